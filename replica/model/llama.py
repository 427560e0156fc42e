"""Llama and the families that compute as it does, but for options.

A further one is an entry in `FAMILIES` and a parity test.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replica.model.attention.metadata import Attend
from replica.model.block import Block
from replica.model.family import Family
from replica.model.layer_ops import LayerOps
from replica.model.linear import Linear
from replica.model.norm import RMSNorm
from replica.model.rotary import Rotation
from replica.model.spec import ModelSpec


class LlamaBlock(Block):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self, spec: ModelSpec, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, index, dtype, device)
        self.attention_norm = self._norm()
        self.mlp_norm = self._norm()

    def forward(
        self,
        ops: LayerOps,
        residual: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        attend: Attend,
    ) -> Tensor:
        x = ops.add_norm(residual, update, self.attention_norm)
        update = self.attention(ops, x, rotation, attend)
        return self.mlp(ops, ops.add_norm(residual, update, self.mlp_norm))

    def norms(self) -> dict[str, RMSNorm]:
        return {
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": self.mlp_norm,
        }


class Phi3Block(LlamaBlock):
    """Its checkpoints hold queries, keys and values as one weight, as we do, and so the MLP."""

    def projections(self) -> dict[str, tuple[Linear, slice]]:
        return {
            "self_attn.qkv_proj": (self.qkv, slice(None)),
            "self_attn.o_proj": (self.output, slice(None)),
            "mlp.gate_up_proj": (self.gate_up, slice(None)),
            "mlp.down_proj": (self.down, slice(None)),
        }


_ALL_BIASED = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}

FAMILIES = {
    "llama": Family(block=LlamaBlock, reads=_ALL_BIASED | {"mlp_bias": "mlp_bias"}),
    "mistral": Family(block=LlamaBlock, windows="all"),
    "ministral": Family(block=LlamaBlock, windows="by layer"),
    "qwen2": Family(block=LlamaBlock, windows="by layer", has={"qkv_bias": True}),
    "qwen3": Family(block=LlamaBlock, windows="by layer", reads=_ALL_BIASED, has={"qk_norm": True}),
    "phi3": Family(block=Phi3Block, windows="all"),
}

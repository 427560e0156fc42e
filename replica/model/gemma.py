"""Gemma 2 and 3 (text): norms on both sides of attention and MLP, kept as distances from 1."""

from __future__ import annotations

import torch
from torch import Tensor

from replica.model.attention.metadata import Attend
from replica.model.block import Block
from replica.model.family import Family
from replica.model.layer_ops import LayerOps
from replica.model.norm import RMSNorm
from replica.model.rotary import Rotation
from replica.model.spec import ModelSpec


class GemmaBlock(Block):
    """What attention and MLP give is normalised once more before it is added."""

    norm_offset = 1.0

    def __init__(
        self, spec: ModelSpec, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, index, dtype, device)
        self.attention_norm = self._norm()
        self.norm_behind_attention = self._norm()
        self.mlp_norm = self._norm()
        self.norm_behind_mlp = self._norm()

    def forward(
        self,
        ops: LayerOps,
        residual: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        attend: Attend,
    ) -> Tensor:
        x = ops.add_norm(residual, update, self.attention_norm)
        product = self.attention(ops, x, rotation, attend)
        update = ops.normalised(product, self.norm_behind_attention)
        x = ops.add_norm(residual, update, self.mlp_norm)
        return ops.normalised(self.mlp(ops, x), self.norm_behind_mlp)

    def norms(self) -> dict[str, RMSNorm]:
        return {
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": self.norm_behind_attention,
            "pre_feedforward_layernorm": self.mlp_norm,
            "post_feedforward_layernorm": self.norm_behind_mlp,
        }


_READS = {
    "qkv_bias": "attention_bias",
    "output_bias": "attention_bias",
    "logit_soft_cap": "final_logit_softcapping",
}

FAMILIES = {
    "gemma2": Family(
        block=GemmaBlock,
        reads=_READS,
        windows="by layer",
        activation="hidden_activation",
        query_scalar="query_pre_attn_scalar",
        soft_cap="attn_logit_softcapping",
        scales_embedding=True,
    ),
    # transformers reads a soft cap of scores for it, too, and does not compute it: refused.
    "gemma3_text": Family(
        block=GemmaBlock,
        reads=_READS,
        has={"qk_norm": True},
        windows="by layer",
        turns_by_layer=True,
        activation="hidden_activation",
        query_scalar="query_pre_attn_scalar",
        scales_embedding=True,
    ),
}

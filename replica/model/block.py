"""What the blocks of all architectures share: the weights of attention and MLP, and their order.

A subclass adds norms and says where they stand. Blocks know neither which sequence a token belongs
to nor where weights come from; the names in checkpoints are transformers'.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from replica.model.attention.metadata import Attend
from replica.model.layer_ops import LayerOps
from replica.model.linear import Linear
from replica.model.norm import RMSNorm
from replica.model.rotary import QKNorm, Rotation
from replica.model.spec import ModelSpec


class Block(nn.Module):
    """One layer. Its weights are uninitialised until they are loaded."""

    qk_scale: nn.Parameter | None
    norm_offset = 0.0
    """Added to the scales of norms: some architectures store them without it."""

    def __init__(
        self, spec: ModelSpec, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec, self.layer, self.index = spec, spec.layers[index], index
        self._dtype, self._device = dtype, device
        hidden, heads, kv_heads = spec.hidden_size, spec.num_heads, spec.num_kv_heads
        width = heads * spec.head_dim

        def linear(inputs: int, outputs: int, *, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias, device, dtype)

        self.qkv = linear(hidden, width + 2 * kv_heads * spec.head_dim, bias=spec.qkv_bias)
        scale = torch.empty(heads + kv_heads, spec.head_dim, device=device, dtype=dtype)
        self.qk_scale = nn.Parameter(scale) if spec.qk_norm else None
        self.output = linear(width, hidden, bias=spec.output_bias)
        self.gate_up = linear(hidden, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down = linear(spec.intermediate_size, hidden, bias=spec.mlp_bias)

    def forward(
        self,
        ops: LayerOps,
        residual: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        attend: Attend,
    ) -> Tensor:
        """residual: [T, hidden_size], changed in place. update: the product that the layer before
        still has to add to it. Returns what this layer still has to add: adding goes with the next
        norm."""
        raise NotImplementedError

    def attention(self, ops: LayerOps, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """A product of x [T, hidden_size]."""
        heads = attend(self.index, ops.linear(x, self.qkv), rotation, self._qk_norm)
        return ops.linear(heads, self.output)

    def mlp(self, ops: LayerOps, x: Tensor) -> Tensor:
        """A product of x [T, hidden_size]."""
        return ops.linear(ops.gated(x, self.gate_up, self.layer.activation), self.down)

    def norms(self) -> dict[str, RMSNorm]:
        """By their names in checkpoints."""
        raise NotImplementedError

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Names of a layer's tensors in checkpoints, and the part of a weight that each fills."""
        views: dict[str, Tensor] = {}
        for name, norm in self.norms().items():
            views[f"{name}.weight"] = norm.weight
        for name, (layer, part) in self.projections().items():
            views[f"{name}.weight"] = layer.weight[part]
            if layer.bias is not None:
                views[f"{name}.bias"] = layer.bias[part]
        if self.qk_scale is not None:
            q, k = torch.split(self.qk_scale, [self.spec.num_heads, self.spec.num_kv_heads])
            views |= {"self_attn.q_norm.weight": q, "self_attn.k_norm.weight": k}
        return views

    def projections(self) -> dict[str, tuple[Linear, slice]]:
        """By their names in checkpoints: the layer, and which of its outputs."""
        spec = self.spec
        q = spec.num_heads * spec.head_dim
        k = q + spec.num_kv_heads * spec.head_dim
        gate = spec.intermediate_size
        return {
            "self_attn.q_proj": (self.qkv, slice(q)),
            "self_attn.k_proj": (self.qkv, slice(q, k)),
            "self_attn.v_proj": (self.qkv, slice(k, None)),
            "self_attn.o_proj": (self.output, slice(None)),
            "mlp.gate_proj": (self.gate_up, slice(gate)),
            "mlp.up_proj": (self.gate_up, slice(gate, None)),
            "mlp.down_proj": (self.down, slice(None)),
        }

    def _norm(self) -> RMSNorm:
        return RMSNorm(
            self.spec.hidden_size,
            self.spec.norm_eps,
            offset=self.norm_offset,
            dtype=self._dtype,
            device=self._device,
        )

    @property
    def _qk_norm(self) -> QKNorm | None:
        if self.qk_scale is None:
            return None
        return QKNorm(self.qk_scale, self.spec.norm_eps, self.norm_offset)

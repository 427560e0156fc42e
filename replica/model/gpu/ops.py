"""The arithmetic of a layer on a GPU: fused kernels, and for each product what was found fastest.

Without plans every product is cuBLAS's, so that nothing depends on a kernel of ours having been
tried on this GPU. `replica.model.gpu.tuning` finds plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from replica.model.gpu import elementwise
from replica.model.gpu.dependent_launch import launches_early
from replica.model.gpu.padding import rounded, with_padding
from replica.model.gpu.skinny import MAX_TOKENS, Plan, product, tile_tokens
from replica.model.linear import Linear
from replica.model.norm import RMSNorm
from replica.model.rotary import Rotation, angles
from replica.model.spec import Activation

Kind: TypeAlias = Literal["linear", "gated", "logits"]


@dataclass(frozen=True, slots=True)
class ProductKey:
    """All that the speed of a product depends on."""

    kind: Kind
    outputs: int
    inputs: int
    tokens: int
    """Number of tokens, rounded up to a multiple of what one program computes."""

    def __str__(self) -> str:
        return f"{self.kind} {self.outputs}x{self.inputs} of {self.tokens}"


@dataclass(slots=True)
class GpuOps:
    """`replica.model.layer_ops.LayerOps`. A product is [parts, T, outputs]."""

    device: torch.device
    plans: dict[ProductKey, Plan | None] = field(default_factory=dict)
    """How each product is computed; cuBLAS where there is no plan."""
    rounds: bool = False
    """Whether cuBLAS is given round numbers of tokens only (`replica.model.gpu.padding`)."""
    dependent: bool = field(init=False)

    def __post_init__(self) -> None:
        self.dependent = launches_early(self.device)

    def for_chunks(self) -> GpuOps:
        """cuBLAS takes half the host's time that our kernels for few tokens take to launch. Chunks
        are of any length."""
        return GpuOps(self.device, rounds=True)

    def rotation(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
        return Rotation(*angles(positions, frequencies))

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: RMSNorm) -> Tensor:
        return elementwise.add_norm(residual, update, norm, dependent=self.dependent)

    def normalised(self, product: Tensor, norm: RMSNorm) -> Tensor:
        return elementwise.normalised(product, norm, dependent=self.dependent)

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        plan = self._plan("linear", x, layer)
        if plan is None:
            return self._whole(x, layer).unsqueeze(0)
        parts = product(x, layer.weight, layer.bias, plan)
        if layer.epilogue is None:
            return parts
        return layer.finished(x, parts.sum(0).to(x.dtype)).unsqueeze(0)

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation) -> Tensor:
        plan = self._plan("gated", x, gate_up) if gate_up.is_bare else None
        if plan is None:
            both = self._whole(x, gate_up)
            return elementwise.activate(both, activation, dependent=self.dependent)
        return product(x, gate_up.weight, None, plan, activation=activation)[0]

    def logits(self, x: Tensor, head: Linear, out: Tensor) -> None:
        """As of every kind of these. With `rounds` rows behind those of `out` are written, too, as
        far as there are any."""
        if head.format is not None:
            head.format.logits(x, out)
            return
        plan = self._plan("logits", x, head)
        if plan is not None:
            product(x, head.weight, None, plan, out=out)
            return
        if self.rounds:
            x, out = _rounded_logits(x, out)
        if x.dtype == torch.float32:
            torch.mm(x, head.weight.t(), out=out)
        else:
            torch.mm(x, head.weight.t(), out_dtype=torch.float32, out=out)

    def _whole(self, x: Tensor, layer: Linear) -> Tensor:
        """[T, outputs], by cuBLAS if the weight is plain."""
        if layer.format is not None:
            return layer.product(x)
        rows = with_padding(x) if self.rounds else x
        return layer.finished(x, F.linear(rows, layer.weight, layer.bias)[: len(x)])

    def _plan(self, kind: Kind, x: Tensor, layer: Linear) -> Plan | None:
        if len(x) > MAX_TOKENS or layer.format is not None:
            return None
        return self.plans.get(product_key(kind, layer, len(x)))


def _rounded_logits(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """The same with as many rows as is round, or as there are."""
    there = (out.untyped_storage().nbytes() // out.itemsize - out.storage_offset()) // out.stride(0)
    count = min(rounded(len(x)), there)
    rows = x.new_empty(count, x.shape[1])
    rows[: len(x)] = x
    return rows, out.as_strided((count, out.shape[1]), out.stride())


def product_key(kind: Kind, layer: Linear, tokens: int) -> ProductKey:
    return ProductKey(kind, layer.out_features, layer.in_features, tile_tokens(tokens))

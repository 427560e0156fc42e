"""The arithmetic of a layer beside attention, in the few pieces that a device may want to fuse.

A *product*, what `linear` returns, is opaque: only `add_norm` and the attention of the same
device read it. On a CPU it is a plain tensor; on a GPU it may come in parts.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from replica.model.linear import Linear
from replica.model.rotary import Rotation, angles


class LayerOps(Protocol):
    def for_chunks(self) -> LayerOps:
        """The same arithmetic for steps that are launched piece by piece, which on a GPU takes the
        host longer than the device."""

    def rotation(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: int64 [T]. frequencies: float32 [head_dim / 2], radians per position."""

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: nn.RMSNorm) -> Tensor:
        """Add the product `update` to residual [T, hidden], in place, and normalise the sum."""

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        """The product of x [T, inputs]."""

    def gated(self, x: Tensor, gate_up: Linear) -> Tensor:
        """[T, intermediate]: silu(gate) * up, of the merged projection."""

    def logits(self, x: Tensor, head: Linear, out: Tensor) -> None:
        """x: [S, hidden]. out: float32 [S, vocab_size]."""


class TorchOps:
    """For CPUs, with nothing but torch; `replica.model.cpu` has faster ones."""

    def pack(self, layer: Linear) -> None:
        """Lay the weight out as this class likes it best."""

    def for_chunks(self) -> LayerOps:
        return self

    def rotation(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
        cos, sin = (part.unsqueeze(1) for part in angles(positions, frequencies))
        signed = torch.cat((-sin, sin), -1)
        return Rotation(torch.cat((cos, cos), -1).to(dtype), signed.to(dtype))

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: nn.RMSNorm) -> Tensor:
        if update is not None:
            residual += update
        normalised: Tensor = norm(residual)
        return normalised

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        product: Tensor = layer(x)
        return product

    def gated(self, x: Tensor, gate_up: Linear) -> Tensor:
        gate, up = self.linear(x, gate_up).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def logits(self, x: Tensor, head: Linear, out: Tensor) -> None:
        out.copy_(self.linear(x, head))


def layer_ops(device: torch.device) -> LayerOps:
    if device.type == "cpu":
        return TorchOps()
    # Triton is installed where there is a GPU only.
    from replica.model.gpu.ops import GpuOps

    return GpuOps(device)

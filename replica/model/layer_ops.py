"""The arithmetic of a layer beside attention, in the few pieces that a device may want to fuse.

A *product*, what `linear` returns, is opaque: only `add_norm`, `normalised` and the attention of
the same device read it. On a CPU it is a plain tensor; on a GPU it may come in parts. What has to
happen to it before anybody reads it is its layer's `epilogue`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from replica.model.linear import Linear, activated
from replica.model.norm import RMSNorm
from replica.model.rotary import Rotation, angles
from replica.model.spec import Activation


class LayerOps(Protocol):
    def for_chunks(self) -> LayerOps:
        """The same arithmetic for steps that are launched piece by piece, which on a GPU takes the
        host longer than the device."""

    def rotation(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: int64 [T]. frequencies: float32 [head_dim / 2], radians per position."""

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: RMSNorm) -> Tensor:
        """Add the product `update` to residual [T, hidden], in place, and normalise the sum."""

    def normalised(self, product: Tensor, norm: RMSNorm) -> Tensor:
        """The norm of a product, as a product."""

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        """The product of x [T, inputs]."""

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation) -> Tensor:
        """[T, intermediate]: activation(gate) * up, of the merged projection."""

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

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: RMSNorm) -> Tensor:
        if update is not None:
            residual += update
        normalised: Tensor = norm(residual)
        return normalised

    def normalised(self, product: Tensor, norm: RMSNorm) -> Tensor:
        return self.add_norm(product, None, norm)

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        return layer.product(x)

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation) -> Tensor:
        if gate_up.format is not None and gate_up.is_bare:
            fused = gate_up.format.gated(x, activation)
            if fused is not None:
                return fused
        return activated(self.linear(x, gate_up), activation)

    def logits(self, x: Tensor, head: Linear, out: Tensor) -> None:
        if head.format is None:
            out.copy_(F.linear(x, head.weight))
        else:
            head.format.logits(x, out)


def layer_ops(device: torch.device) -> LayerOps:
    if device.type == "cpu":
        return TorchOps()
    # Triton is installed where there is a GPU only.
    from replica.model.gpu.ops import GpuOps

    return GpuOps(device)

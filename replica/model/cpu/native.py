"""Products, norms and activations by the kernels of `products.cpp`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from replica.model.cpu.library import kernel
from replica.model.layer_ops import TorchOps
from replica.model.linear import Linear


def supports(layer: Linear) -> bool:
    """Inputs are taken two at a time."""
    return layer.in_features % 2 == 0


def lay_out(weight: Tensor, lanes: int) -> Tensor:
    """[outputs, inputs] in the blocks that `products.cpp` describes, an even number of them."""
    outputs, inputs = weight.shape
    blocks = 2 * -(-outputs // (2 * lanes))
    padded = weight.new_zeros(blocks * lanes, inputs)
    padded[:outputs] = weight
    pairs = padded.view(blocks, lanes, inputs // 2, 2)
    order = (0, 2, 1, 3) if weight.dtype == torch.bfloat16 else (0, 2, 3, 1)
    return pairs.permute(order).contiguous()


class NativeOps(TorchOps):
    """For one type of weights. Layers that were not packed are torch's."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.library = library
        self._lanes = int(library.lanes())
        self._linear = kernel(library, "linear", dtype)
        self._logits = kernel(library, "logits", dtype)
        self._gated = kernel(library, "gated", dtype)
        self._add_norm = kernel(library, "add_norm", dtype)

    def pack(self, layer: Linear) -> None:
        if supports(layer):
            layer.replace_weight(lay_out(layer.weight, self._lanes))

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: nn.RMSNorm) -> Tensor:
        out = torch.empty_like(residual)
        self._add_norm(
            residual.data_ptr(),
            None if update is None else update.data_ptr(),
            norm.weight.data_ptr(),
            out.data_ptr(),
            *residual.shape,
            norm.eps,
        )
        return out

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        if layer.packed is None:
            return super().linear(x, layer)
        x, bias = x.contiguous(), layer.bias
        out = x.new_empty(len(x), layer.out_features)
        self._linear(
            x.data_ptr(),
            layer.packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *x.shape,
            layer.out_features,
        )
        return out

    def gated(self, x: Tensor, gate_up: Linear) -> Tensor:
        width = gate_up.out_features // 2
        if gate_up.packed is None or width % self._lanes:  # the halves share a block
            return super().gated(x, gate_up)
        out = x.new_empty(len(x), width)
        self._gated(x.data_ptr(), gate_up.packed.data_ptr(), out.data_ptr(), *x.shape, width)
        return out

    def logits(self, x: Tensor, head: Linear, out: Tensor) -> None:
        if head.packed is None:
            super().logits(x, head, out)
        else:
            packed = head.packed.data_ptr()
            self._logits(x.data_ptr(), packed, out.data_ptr(), *x.shape, head.out_features)

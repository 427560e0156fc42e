"""Products, norms and activations by the kernels of `products.cpp`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from replica.model.cpu.library import kernel
from replica.model.layer_ops import TorchOps
from replica.model.linear import Linear, activated
from replica.model.norm import RMSNorm
from replica.model.spec import Activation


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


class NativeFormat:
    """A weight in the blocks of `lay_out`, as a `Format`."""

    def __init__(self, weight: Tensor, library: ctypes.CDLL) -> None:
        self._outputs = len(weight)
        self._lanes = int(library.lanes())
        self._weight = lay_out(weight, self._lanes)
        self._linear = kernel(library, "linear", weight.dtype)
        self._logits = kernel(library, "logits", weight.dtype)
        self._gated = kernel(library, "gated", weight.dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(len(x), self._outputs)
        self._linear(
            x.data_ptr(),
            self._weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *x.shape,
            self._outputs,
        )
        return out

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        width = self._outputs // 2
        if width % self._lanes:  # the halves share a block
            return activated(self.product(x, None), activation)
        out = x.new_empty(len(x), width)
        gelu = activation == "gelu_tanh"
        self._gated(x.data_ptr(), self._weight.data_ptr(), out.data_ptr(), *x.shape, width, gelu)
        return out

    def logits(self, x: Tensor, out: Tensor) -> None:
        weight = self._weight.data_ptr()
        self._logits(x.data_ptr(), weight, out.data_ptr(), *x.shape, self._outputs)


class NativeOps(TorchOps):
    """For one type of weights. Layers that were not packed are torch's."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.library = library
        self._add_norm = kernel(library, "add_norm", dtype)

    def pack(self, layer: Linear) -> None:
        if supports(layer):
            layer.replace_weight(NativeFormat(layer.weight, self.library))

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: RMSNorm) -> Tensor:
        out = torch.empty_like(residual)
        self._add_norm(
            residual.data_ptr(),
            None if update is None else update.data_ptr(),
            norm.weight.data_ptr(),
            norm.offset,
            out.data_ptr(),
            *residual.shape,
            norm.eps,
        )
        return out

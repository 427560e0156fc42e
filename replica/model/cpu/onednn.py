"""Products by oneDNN, with weights in the blocks that its kernels read.

With the plain layout each call sorts the weight anew: about a third of a decode step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replica.model.layer_ops import TorchOps
from replica.model.linear import Linear
from replica.model.spec import Activation

_ROWS_HINT = 8
"""Number of rows that oneDNN chooses the layout of a weight for. Any number can be multiplied with
it."""


def is_available(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class OneDnnFormat:
    """A weight in the blocks of oneDNN, as a `Format`."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        multiply = torch.ops.mkldnn._linear_pointwise
        product: Tensor = multiply(x, self._weight, bias, "none", [], "")
        return product

    def gated(self, x: Tensor, activation: Activation) -> None:
        """It has no kernel for that."""

    def logits(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.product(x, None))


class OneDnnOps(TorchOps):
    def pack(self, layer: Linear) -> None:
        layer.replace_weight(OneDnnFormat(layer.weight))

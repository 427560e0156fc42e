"""Products by oneDNN, with weights in the blocks that its kernels read.

With the plain layout each call sorts the weight anew: about a third of a decode step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replica.model.layer_ops import TorchOps
from replica.model.linear import Linear

_ROWS_HINT = 8
"""What oneDNN chooses the layout for. Any number of rows may be multiplied with it."""


def is_available(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class OneDnnOps(TorchOps):
    def pack(self, layer: Linear) -> None:
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight, _ROWS_HINT)
        layer.replace_weight(weight)

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        if layer.packed is None:
            return super().linear(x, layer)
        multiply = torch.ops.mkldnn._linear_pointwise
        product: Tensor = multiply(x, layer.packed, layer.bias, "none", [], "")
        return product

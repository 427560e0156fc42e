"""A linear layer for inference whose weight can be laid out for the CPU it runs on.

It knows nothing of the model around it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

_ROWS_HINT = 8
"""What oneDNN chooses the packed layout for. Any number of rows may be multiplied with it."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has oneDNN kernels for packed weights of that type."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear(nn.Linear):
    """`nn.Linear` without initial values: the weight is there to be loaded, then packed."""

    _packed: Tensor | None = None

    def reset_parameters(self) -> None:
        pass

    def pack(self) -> None:
        """Lay the weight out in the blocks that oneDNN's kernels read, and let go of the original.

        With the plain layout each call sorts the weight anew: about a third of a decode step.
        """
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _ROWS_HINT)
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, out_features]."""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out

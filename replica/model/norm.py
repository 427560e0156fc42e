"""RMS norm (arXiv:1910.07467), whose scale may be kept as its distance from something."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Of the last dimension, scaled by weight + offset. With an offset all of it is float32: what
    a weight near 0 says would be lost in the sum otherwise."""
    if not offset:
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
    scaled = F.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(weight.float() + offset)
    return scaled.to(x.dtype)


class RMSNorm(nn.Module):
    """Its weight is uninitialised until it is loaded."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        offset: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)

"""Rotary position embedding (arXiv:2104.09864), as torch does it well on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replica.model.norm import rms_norm


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of a step's T tokens. Which of the two shapes it has is its maker's business,
    `replica.model.layer_ops`, and that of the attention back end for the same device."""

    cos: Tensor
    sin: Tensor
    """On a CPU [T, 1, head_dim] in the model's type, `sin` negative in the first half; on a GPU
    float32 [T, head_dim / 2]."""


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Queries and keys are normalised per head before the rotation."""

    scale: Tensor
    """[heads + kv_heads, head_dim]"""
    eps: float
    offset: float = 0.0
    """Added to the scale of the norm, in float32."""


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [T, head_dim / 2]."""
    turned = torch.outer(positions.to(torch.float32), frequencies)
    return turned.cos(), turned.sin()


def rotate_(qk: Tensor, rotation: Rotation, norm: QKNorm | None) -> None:
    """Queries and keys [T, heads, head_dim], in place."""
    x = qk
    if norm is not None:
        x = rms_norm(qk, norm.scale, norm.eps, norm.offset)
    # Halves (a, b) turn into (a cos - b sin, b cos + a sin).
    half = qk.shape[-1] // 2
    torch.addcmul(x * rotation.cos, x.roll(half, -1), rotation.sin, out=qk)

"""Draws that depend on (seed, choice, position) alone, and on nothing that happened before.

A counter-based generator needs no state per row, so a sequence draws the same numbers in any
batch, slot or replica, and after a preemption. The mixer is the finaliser of SplitMix64
(Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _MIX1
    state = (state ^ _shift_right(state, 27)) * _MIX2
    return state ^ _shift_right(state, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """float64 in [0, 1), of the shape of the int64 arguments."""
    state = _mix(seed + _GOLDEN)
    state = _mix(state ^ (choice + 1) * _GOLDEN)
    state = _mix(state ^ (position + 1) * _GOLDEN)
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53

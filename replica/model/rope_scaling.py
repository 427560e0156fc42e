"""What a configuration says about rotary angles: frequencies that hold at every position.

Some ways of scaling take their frequencies from the length of a sequence, which would change keys
that are in the cache already, and in transformers one prompt's length changes its neighbours'
answers. Of those we serve the lengths over which they are constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from replica.model.unsupported import UnsupportedModel

Parameters: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rotary:
    """How queries and keys turn."""

    frequencies: tuple[float, ...]
    """[head_dim / 2] radians per position, computed in float32 as models were trained with."""
    max_position: int
    """Longest sequence that these frequencies hold for, in tokens."""
    magnitude: float = 1.0
    """Factor on rotated queries and keys: scores grow by its square."""


def rotary(head_dim: int, parameters: Any, max_position: int) -> Rotary:
    """parameters: `rope_parameters` of a configuration, of one kind of layers. Raises
    UnsupportedModel on variants that are unknown, and on numbers without sense."""
    if not isinstance(parameters, Mapping):
        raise UnsupportedModel(f"The rotary options ({parameters!r:.100}) are not a mapping.")
    kind = parameters.get("rope_type", parameters.get("type"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedModel(
            f"Rotary scaling {kind!r} is not supported, only {', '.join(_KINDS)}."
        )
    _check(kind, parameters)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    periods: Tensor = parameters["rope_theta"] ** exponents
    senseless = f"The numbers of rotary scaling {kind!r} give no finite angles."
    try:
        made = _KINDS[kind](periods, parameters, max_position)
    except ArithmeticError as error:
        raise UnsupportedModel(senseless) from error
    if not all(map(math.isfinite, (*made.frequencies, made.magnitude))):
        raise UnsupportedModel(senseless)
    return made


_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("original_max_position_embeddings",),
}  # fmt: skip
"""The numbers that each kind of scaling requires."""
_OPTIONAL_NUMBERS = (
    "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
_LARGEST = 1e30
_KNOWN = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate",
    "short_factor", "long_factor", *_OPTIONAL_NUMBERS, *_NUMBERS["llama3"],
}  # fmt: skip


def _check(kind: str, parameters: Parameters) -> None:
    unknown = sorted(str(name) for name in parameters if name not in _KNOWN)
    if unknown:
        raise UnsupportedModel(f"The rotary option {unknown[0]!r} is not supported.")
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModel("Rotating only a part of each head is not supported.")
    needed = ("rope_theta", *_NUMBERS.get(kind, ()))
    for name in (*needed, *_OPTIONAL_NUMBERS):
        value: Any = parameters.get(name)
        if value is None and name not in needed:
            continue
        if type(value) not in (int, float) or not 0 < value < _LARGEST:
            raise UnsupportedModel(
                f"Rotary scaling {kind!r} needs a positive {name}, not {value!r:.100}."
            )


def _default(periods: Tensor, parameters: Parameters, max_position: int) -> Rotary:
    """Of `dynamic`, too: it changes them for longer sequences only."""
    return Rotary(tuple((1.0 / periods).tolist()), max_position)


def _linear(periods: Tensor, parameters: Parameters, max_position: int) -> Rotary:
    frequencies = 1.0 / periods / parameters["factor"]
    return Rotary(tuple(frequencies.tolist()), max_position)


def _llama3(periods: Tensor, parameters: Parameters, max_position: int) -> Rotary:
    """Slow rotations by `factor` slower, quick ones unchanged, smooth in between."""
    frequencies = 1.0 / periods
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    quick = ((turns - low) / (high - low)).clamp(0, 1)
    stretched = (1 - quick) * frequencies / parameters["factor"] + quick * frequencies
    return Rotary(tuple(stretched.tolist()), max_position)


def _yarn(periods: Tensor, parameters: Parameters, max_position: int) -> Rotary:
    """YaRN (arXiv:2309.00071): likewise, but smooth over dimensions, and scores grow. It is for
    sequences of `factor` times the length that the model was trained for first."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_position / original
    theta, dim = parameters["rope_theta"], 2 * len(periods)

    def dimension(turns: float) -> float:
        """That turns so often over the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    slow = ((torch.arange(len(periods), dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = slow / (factor * periods) + (1 - slow) / periods
    longest = max(max_position, int(original * factor))
    return Rotary(tuple(frequencies.tolist()), longest, _yarn_magnitude(factor, parameters))


def _yarn_magnitude(factor: float, parameters: Parameters) -> float:
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, of_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return grown(mscale) / grown(of_all) if mscale and of_all else grown(1.0)


def _longrope(periods: Tensor, parameters: Parameters, max_position: int) -> Rotary:
    """LongRoPE (arXiv:2402.13753), up to the length from which on it has other factors."""
    original = parameters["original_max_position_embeddings"]
    factors = parameters.get("short_factor")
    numbers = isinstance(factors, list) and all(type(one) in (int, float) for one in factors)
    if not isinstance(factors, list) or not numbers or len(factors) != len(periods):
        raise UnsupportedModel(
            f"Rotary scaling 'longrope' needs {len(periods)} numbers as its short_factor."
        )
    factor = parameters.get("factor") or max_position / original
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        grown = math.log(factor) / math.log(original) if factor > 1 else 0.0
        magnitude = math.sqrt(1 + grown)
    frequencies = 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)
    return Rotary(tuple(frequencies.tolist()), min(max_position, original), magnitude)


_KINDS: Mapping[str, Callable[[Tensor, Parameters, int], Rotary]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _default,
    "longrope": _longrope,
}

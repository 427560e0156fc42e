"""What sets a family of models apart: its block, and what of its configuration matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from replica.model.block import Block


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a `model_type` of transformers is read and computed. An option that changes the
    arithmetic and is not named here is refused (`replica.model.options`)."""

    block: type[Block]
    reads: Mapping[str, str] = field(default_factory=dict)
    """Fields of `ModelSpec`, and the options that say them."""
    has: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelSpec` that are the same for all its models."""
    windows: Literal["none", "all", "by layer"] = "none"
    """Which layers `sliding_window` is for: by layer, `layer_types` says it."""
    turns_by_layer: bool = False
    """Whether `rope_parameters` tells kinds of layers apart."""
    activation: str = "hidden_act"
    """The option that names it."""
    query_scalar: str | None = None
    """The option that stands for the size of a head where scores are scaled."""
    soft_cap: str | None = None
    """The option with the soft cap of scores."""
    scales_embedding: bool = False
    """By the root of the hidden size."""

    @property
    def options(self) -> frozenset[str]:
        """Those that other families may be refused for."""
        more = (self.query_scalar, self.soft_cap)
        return frozenset(self.reads.values()) | {name for name in more if name is not None}

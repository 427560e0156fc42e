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
    """Field of `ModelSpec` -> the option of the configuration that it is read from."""
    has: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelSpec` with the same value for all models of the family."""
    windows: Literal["none", "all", "by layer"] = "none"
    """Which layers `sliding_window` applies to. "by layer": those that `layer_types` names."""
    turns_by_layer: bool = False
    """Whether `rope_parameters` has an entry for each kind of layer."""
    activation: str = "hidden_act"
    """Name of the option with the activation function."""
    query_scalar: str | None = None
    """Name of the option that takes the place of the head size in the scale of attention scores."""
    soft_cap: str | None = None
    """Name of the option with the soft cap of attention scores."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""

    @property
    def options(self) -> frozenset[str]:
        """Those that other families may be refused for."""
        more = (self.query_scalar, self.soft_cap)
        return frozenset(self.reads.values()) | {name for name in more if name is not None}

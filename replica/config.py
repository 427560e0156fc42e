"""Settings of one engine: a frozen value, checked once, read everywhere, written nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

DType: TypeAlias = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs to know at start. Raises ValueError on what cannot work."""

    # Read by pydantic where the application nests this class in its own settings.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    model: str
    """A folder, a hub id, a .gguf file, or `package:NAME/FILE` inside an installed package."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    dtype: DType = "bfloat16"
    device: Literal["cpu"] = "cpu"
    threads: int | None = None
    """CPU threads of a forward pass; by default all cores."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; by default what the model was trained for."""
    max_rows: int = 16
    """Most sequences in one step."""
    kv_tokens: int = 16384
    """Capacity of the KV pool in tokens."""
    block_size: int = 16
    """Tokens per KV block."""
    max_step_tokens: int = 512
    """Most tokens in one step, decode rows and prompt chunks together."""
    step_budget_ms: float | None = None
    """Time that prompt chunks may take of one step, by a cost model fitted at start. Without
    it, `max_step_tokens` alone bounds a step."""
    prefix_cache: bool = True
    overlap: bool = True
    """Prepare step N+1 while step N runs. Off is the synchronous baseline."""

    def __post_init__(self) -> None:
        positive = ("max_rows", "kv_tokens", "block_size", "max_step_tokens")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} must be at least 1, not {getattr(self, name)}")
        if self.max_step_tokens < self.max_rows:
            raise ValueError(
                f"engine.max_step_tokens ({self.max_step_tokens}) must be at least "
                f"engine.max_rows ({self.max_rows}): every running row takes one token a step"
            )
        if self.kv_tokens < self.block_size:
            raise ValueError("engine.kv_tokens must hold at least one block")

    @property
    def num_blocks(self) -> int:
        """KV blocks that sequences can own; the guard block is not among them."""
        return self.kv_tokens // self.block_size

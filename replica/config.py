"""Settings of one engine: a frozen value, checked once, read everywhere, written nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

DType: TypeAlias = Literal["float32", "bfloat16", "auto"]
CPU_KV_TOKENS = 16384


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
    """Of weights, activations and KV pool. "auto" is that of the checkpoint if it is bfloat16, else
    float32, which holds float16 weights as they are."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it runs. `cuda` is the one GPU that Ray gives to the replica."""
    threads: int | None = None
    """CPU threads of a forward pass; by default all cores but one, where there are several."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; by default what the model was trained for."""
    max_rows: int = 16
    """Most sequences in one step."""
    kv_tokens: int | None = None
    """Capacity of the KV pool in tokens. By default 16384 on a CPU, and on a GPU what
    `memory_fraction` leaves."""
    memory_fraction: float = 0.9
    """Share of the GPU's memory for weights, graphs, workspace and KV pool together."""
    cuda_graphs: bool = True
    """Capture decode steps as graphs at start. A CPU has none."""
    graph_sizes: tuple[int, ...] | None = None
    """Batch sizes that graphs are captured for; `max_rows` is always one of them. By default
    a spacing that keeps padding low (`replica.device.graph_sizes`)."""
    block_size: int = 16
    """Tokens per KV block."""
    max_step_tokens: int = 512
    """Most tokens in one step, decode rows and prompt chunks together."""
    step_budget_ms: float | None = 250.0
    """Time that prompt chunks may take of one step, by a cost model fitted at start: others wait
    no longer for their next token. With null, `max_step_tokens` alone bounds a step."""
    prefix_cache: bool = True
    """Keep the KV of what was computed, for requests that begin alike."""
    cache_dir: str = "~/.cache/fairstream"
    """Folder for what a start measured and compiled: the next one takes it from there."""
    overlap: bool = True
    """Prepare step N+1 while step N runs. Off is the synchronous baseline."""

    def __post_init__(self) -> None:
        positive = ("max_rows", "kv_tokens", "block_size", "max_step_tokens")
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"engine.{name} must be at least 1, not {value}")
        if any(not 1 <= size <= self.max_rows for size in self.graph_sizes or ()):
            raise ValueError(f"engine.graph_sizes must lie in [1, {self.max_rows}] (max_rows)")
        if not 0 < self.memory_fraction < 1:
            raise ValueError("engine.memory_fraction must lie between 0 and 1")
        if self.max_step_tokens < self.max_rows:
            raise ValueError(
                f"engine.max_step_tokens ({self.max_step_tokens}) must be at least "
                f"engine.max_rows ({self.max_rows}): every running row takes one token a step"
            )
        if self.step_budget_ms is not None and self.step_budget_ms <= 0:
            raise ValueError("engine.step_budget_ms must be positive")
        if self.kv_tokens is not None and self.kv_tokens < self.block_size:
            raise ValueError("engine.kv_tokens must hold at least one block")
        if self.max_model_len is not None and (self.kv_tokens or self.device != "cuda"):
            holds = self.num_blocks * self.block_size
            if self.max_model_len > holds:
                raise ValueError(
                    f"engine.max_model_len is {self.max_model_len} tokens, but the KV pool holds "
                    f"only {holds}: raise engine.kv_tokens or lower engine.max_model_len"
                )

    @property
    def num_blocks(self) -> int:
        """KV blocks that sequences can own; the guard block is not among them.

        Raises ValueError on a GPU while nobody has measured how many fit (`replica.memory`).
        """
        if self.kv_tokens is None and self.device == "cuda":
            raise ValueError("engine.kv_tokens is not known before the GPU's memory was measured")
        return (self.kv_tokens or CPU_KV_TOKENS) // self.block_size

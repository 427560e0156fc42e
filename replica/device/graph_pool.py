"""Steps recorded once and replayed: the launch of a whole forward pass costs one call.

The pool knows keys, counts and times, not what is recorded nor how: a device's recorder does that
(`replica.device.cuda`). Nothing is recorded under traffic: what has no graph runs as it is, and is
counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from tqdm import tqdm

from replica.device.graph_sizes import fit_report
from replica.device.stream import Work

SamplingKind: TypeAlias = Literal["plain", "shaped"]
"""With "shaped", the graph also covers penalties, biases and stop tokens that are held back."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What is fixed when a graph is captured, beside constants of the engine.

    The slot fixes the addresses of inputs and outputs, the size every shape and every number
    that a kernel is launched with. Contexts, positions and parameters are data on the device.
    """

    phase: Literal["forward", "sampling", "logprobs"]
    slot: int
    size: int
    """Rows, padding included."""
    kind: SamplingKind | None = None
    """The kind of sampling that the graph contains."""


class Recording(Protocol):
    """One recorded piece of work, and what it cost."""

    capture_ms: float
    instantiate_ms: float
    memory_bytes: int
    """How much less device memory was free after the recording."""
    eager_ms: float
    """Time of the same work without a graph, until the device is idle again."""
    replay_ms: float

    def replay(self) -> None: ...


Recorder: TypeAlias = Callable[[Work], Recording]
"""Runs work once or more, then records it. Raises RuntimeError if that fails."""


class Graphs(Protocol):
    """How a pipeline runs the parts of a step."""

    sizes: Sequence[int]
    """Batch sizes that parts are recorded for."""
    counts: Counter[str]
    """By kind: "replays"; "eager", parts of steps that ran without a graph; "padding", padding rows
    of replays."""

    def capture(self, works: Mapping[GraphKey, Work]) -> None:
        """Record parts of steps, in order. Raises CaptureFailed."""

    def padded(self, count: int) -> int:
        """The size in which a step with `count` sampling rows runs, at least `count`."""

    def run(self, key: GraphKey | None, rows: int, work: Work) -> None:
        """Do `work`, by replaying `key` if that was recorded. rows: those that are not padding."""

    def fit_report(self) -> str:
        """Which sizes would suit the batches so far, to be read by a person."""


class NoGraphs:
    """Runs everything as it is."""

    sizes: Sequence[int] = ()

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def capture(self, works: Mapping[GraphKey, Work]) -> None:
        pass

    def padded(self, count: int) -> int:
        return count

    def run(self, key: GraphKey | None, rows: int, work: Work) -> None:
        work()

    def fit_report(self) -> str:
        return ""


class CaptureFailed(RuntimeError):
    """A graph could not be recorded at start. The engine does not fall back silently."""


@dataclass(slots=True)
class GraphReport:
    """One graph: what it cost, and what it brought."""

    key: GraphKey
    recording: Recording
    replays: int = 0
    rows: int = 0
    """Rows of all its replays, padding rows not counted."""

    @property
    def padding_share(self) -> float:
        return 1 - self.rows / (self.replays * self.key.size) if self.replays else 0.0

    @property
    def paid_after(self) -> float:
        """Replays after which recording has cost less time than it saved."""
        saved = self.recording.eager_ms - self.recording.replay_ms
        cost = self.recording.capture_ms + self.recording.instantiate_ms
        return cost / saved if saved > 0 else float("inf")


class GraphPool:
    """The graphs of one engine."""

    def __init__(
        self, record: Recorder, sizes: Sequence[int], free_bytes: Callable[[], int]
    ) -> None:
        """sizes: ascending; the last is the largest batch. free_bytes: what the device has left."""
        self.sizes = sizes
        self.counts: Counter[str] = Counter()
        self.eager: Counter[str] = Counter()
        """Parts of steps that ran without a graph, by phase."""
        self.seen: Counter[int] = Counter()
        """How many replayed steps sampled so many rows: rows -> steps."""
        self._record = record
        self._free_bytes = free_bytes
        self._reports: dict[GraphKey, GraphReport] = {}

    def capture(self, works: Mapping[GraphKey, Work]) -> None:
        """As in `Graphs`, with a progress bar on stderr."""
        with tqdm(works.items(), desc="Capturing graphs", unit="graph") as progress:
            for key, work in progress:
                try:
                    self._reports[key] = GraphReport(key, self._record(work))
                except RuntimeError as error:
                    raise CaptureFailed(
                        f"Capturing the {key.phase} graph of batch size {key.size} failed with "
                        f"{self._free_bytes() / 2**30:.2f} GiB of device memory free: lower "
                        f"engine.memory_fraction, engine.max_rows or engine.kv_tokens. {error}"
                    ) from error

    def padded(self, count: int) -> int:
        index = bisect_left(self.sizes, count)
        return self.sizes[index] if index < len(self.sizes) else count

    def run(self, key: GraphKey | None, rows: int, work: Work) -> None:
        report = self._reports.get(key) if key is not None else None
        if key is None or report is None:
            self.counts["eager"] += 1
            self.eager[key.phase if key else "irregular"] += 1
            work()
            return
        if key.phase == "sampling":
            self.seen[rows] += 1
        self.counts["replays"] += 1
        self.counts["padding"] += key.size - rows
        report.replays += 1
        report.rows += rows
        report.recording.replay()

    def fit_report(self) -> str:
        """Sizes that would suit the batches so far; empty if there were none."""
        covered = {rows: steps for rows, steps in self.seen.items() if rows <= self.sizes[-1]}
        return fit_report(covered, self.sizes) if covered else ""

    def reports(self) -> list[GraphReport]:
        return list(self._reports.values())

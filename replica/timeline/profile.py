"""What a GPU did while some steps ran, as torch's profiler wrote it, and what it should not have
done.

It knows the rules of streams (`replica.pipeline`), not what the kernels compute. Times are
microseconds of the profiler's clock unless they are said to be the host's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from replica.timeline.engine_trace import STREAMS, DeviceTrace

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
BLOCKING = (
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaStreamSynchronize",
    "cuStreamSynchronize",
)
"""CUDA calls that block the host. The wait for a step's d2h_done polls its event and makes none of
these."""
MARK = "spin_kernel"
ALLOCATION = "an allocation of device or pinned memory"


class Arguments(msgspec.Struct, frozen=True, gc=False):
    stream: Any = None
    correlation: Any = None


class Event(msgspec.Struct, frozen=True, gc=False):
    """A kernel, a copy, a memset, or a CUDA call of the host."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: Arguments = Arguments()

    @property
    def end(self) -> float:
        return self.ts + self.dur

    @property
    def stream(self) -> Any:
        """The profiler's number of the stream that it ran on."""
        return self.args.stream


class _File(msgspec.Struct, frozen=True):
    traceEvents: list[Event]  # noqa: N815  # the format's name


@dataclass(frozen=True, slots=True)
class Profile:
    """What ran behind the marks with which a trace begins."""

    lanes: dict[Any, str]
    """The names of the three streams, by the profiler's numbers."""
    device: list[Event]
    """Kernels, copies and memsets, in order of time."""
    launched: dict[Any, Event]
    """The call that launched each of them, by correlation."""
    calls: list[Event]
    """What the host called while spans were open."""
    offset_us: float
    """The profiler's clock, less the host's."""
    allocations: int

    @property
    def span_us(self) -> float:
        """From the first kernel's start to the last one's end."""
        return max(event.end for event in self.device) - self.device[0].ts

    @property
    def idle_share(self) -> float:
        """Share of the span in which no kernel or copy ran at all."""
        return 1 - union_us((each.ts, each.end) for each in self.device) / self.span_us

    def violations(self) -> list[str]:
        """Each rule that was broken, in words; empty for a clean pipeline."""
        found = Counter(problem for problem, _ in self.problems())
        if self.allocations:
            found[ALLOCATION] += self.allocations
        return [f"{problem} ({count} times)" for problem, count in sorted(found.items())]

    def problems(self) -> Iterator[tuple[str, Event]]:
        """Each event that breaks a rule, and which."""
        for event in self.device:
            if event.stream not in self.lanes:
                yield f"outside the three streams: {event.name[:80]}", event
            if "Pageable" in event.name:
                yield f"a pageable copy: {event.name}", event
        for call in self.calls:
            if call.name in BLOCKING or call.name.startswith(("cudaMemcpy2D", "cuMemcpy")):
                yield f"a blocking call: {call.name}", call


def read_profile(path: Path, device_trace: DeviceTrace) -> Profile:
    """Raises OSError, msgspec.DecodeError, and ValueError for a profile without its marks."""
    events = msgspec.json.decode(path.read_bytes(), type=_File).traceEvents
    events.sort(key=lambda event: event.ts)
    device = [event for event in events if event.cat in ON_DEVICE]
    calls = [event for event in events if event.cat in CALLS]
    launched = {call.args.correlation: call for call in calls}
    # The host launched them one after the other; that they ran so, nothing says.
    marks = [event for event in device if MARK in event.name]
    marks.sort(key=lambda event: launched.get(event.args.correlation, event).ts)
    if len(marks) < len(STREAMS):
        raise ValueError(f"the profile has {len(marks)} marks of its {len(STREAMS)} streams")
    last = marks[len(STREAMS) - 1]
    launch = launched.get(last.args.correlation, last)
    offset = (launch.ts + launch.end) / 2 - device_trace.marks_ns[-1] / 1e3
    return Profile(
        lanes={mark.stream: name for mark, name in zip(marks, STREAMS, strict=False)},
        device=[event for event in device if event.ts > last.ts and MARK not in event.name],
        launched=launched,
        calls=list(_within(calls, device_trace, offset)),
        offset_us=offset,
        allocations=device_trace.allocations,
    )


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that touch each other as one. intervals: in order of their starts."""
    found: list[tuple[float, float]] = []
    for start, end in intervals:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def union_us(intervals: Iterable[tuple[float, float]]) -> float:
    """How long any of them lasted. intervals: in order of their starts."""
    return sum(end - start for start, end in merged(intervals))


def _within(calls: Iterable[Event], device_trace: DeviceTrace, offset: float) -> Iterator[Event]:
    """Those between the first span and the last: others are the trace's own."""
    starts = [span.start_ns for span in device_trace.spans]
    ends = [span.end_ns for span in device_trace.spans]
    first, last = min(starts, default=0), max(ends, default=0)
    return (call for call in calls if first <= (call.ts - offset) * 1e3 < last)

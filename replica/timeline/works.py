"""What ran on the streams of a device and when, on one clock, whoever has told it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from replica.timeline.engine_trace import EngineTrace, Span
from replica.timeline.profile import Event, Profile

OTHER = "other streams"


class Work(NamedTuple):
    """A kernel or a copy; on a CPU, whatever was enqueued at once."""

    lane: str
    """The stream's name, or OTHER."""
    name: str
    step: int | None
    """None of what no span has enqueued."""
    start_us: float
    end_us: float


def works(trace: EngineTrace, profile: Profile | None) -> list[Work]:
    """In order of their starts. Microseconds since the trace began."""
    found = _of_host(trace) if profile is None else _of_gpu(trace, profile)
    return sorted(found, key=lambda work: work.start_us)


def _of_host(trace: EngineTrace) -> Iterator[Work]:
    for span in trace.device_trace.spans:
        if span.lane:
            start, end = (trace.us(ns) for ns in (span.start_ns, span.end_ns))
            yield Work(span.lane, "work", span.step, start, end)


def _of_gpu(trace: EngineTrace, profile: Profile) -> Iterator[Work]:
    launches = _Launches(trace.device_trace.spans)
    shift = profile.offset_us + trace.began_ns / 1e3
    for event in profile.device:
        call = profile.launched.get(event.args.correlation)
        step = launches.step_of(call, profile.offset_us) if call else None
        lane = profile.lanes.get(event.stream, OTHER)
        yield Work(lane, event.name[:80], step, event.ts - shift, event.end - shift)


class _Launches:
    """Finds the step that a CUDA call belongs to: that of the span in which it was made."""

    def __init__(self, spans: list[Span]) -> None:
        of_steps = [span for span in spans if not span.lane and span.step is not None]
        self._spans = sorted(of_steps, key=lambda span: span.start_ns)
        self._starts = [span.start_ns for span in self._spans]

    def step_of(self, call: Event, offset_us: float) -> int | None:
        called_ns = (call.ts - offset_us) * 1e3
        index = bisect_right(self._starts, called_ns) - 1
        if index < 0 or self._spans[index].end_ns < called_ns:
            return None
        return self._spans[index].step

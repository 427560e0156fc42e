"""A timeline in the format of Chrome's traces, which Perfetto opens.

A slice says its slot by a letter: Perfetto chooses colours by names, and leaves digits out of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from replica.timeline.engine_trace import EngineTrace, Step
from replica.timeline.profile import Profile, merged
from replica.timeline.shares import shares, told
from replica.timeline.works import OTHER, Work, works

LANES = (
    "CPU schedule",
    "CPU launch",
    "CPU wait for D2H",
    "CPU deliver",
    "H2D",
    "compute",
    "kernels",
    "D2H",
    "bubbles",
    "hazards",
    OTHER,
)
OF_PHASES = {
    "receive": "CPU schedule",
    "schedule": "CPU schedule",
    "launch": "CPU launch",
    "masks": "CPU launch",
    "wait": "CPU wait for D2H",
    "update": "CPU deliver",
    "deliver": "CPU deliver",
}
OF_STREAMS = {"h2d": "H2D", "compute": "kernels", "d2h": "D2H", OTHER: OTHER}
SLOTS = (("A", "rail_response"), ("B", "rail_animation"))
"""Letters, and colours for viewers that let a trace choose."""
ENGINE = 1
"""The number of the only process."""
MAX_KERNELS = 150_000
"""That are shown; shares are of all."""
SHORTEST_GAP_US = 2.0
Events: TypeAlias = Iterator[dict[str, Any]]
Interval: TypeAlias = tuple[float, float]


def timeline(trace: EngineTrace, profile: Profile | None, title: str) -> dict[str, Any]:
    """title: of the engine. profile: of a GPU."""
    done = works(trace, profile)
    hazards = _hazards(trace, profile)
    events = [
        *_names(f"{title} ({trace.device})"),
        *_host(trace),
        *_steps(trace),
        *_streams(done),
        *_bubbles(trace, done),
        *_problems(trace, profile),
        *_requests(trace),
    ]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "engine": title,
            "device": trace.device,
            "seconds": (trace.ended_ns - trace.began_ns) / 1e9,
            "requests": len(trace.requests),
            "shares": told(shares(trace.steps, done)),
            "hazards": hazards,
        },
    }


def _names(title: str) -> Events:
    yield _event("M", "process_name", 0, args={"name": title})
    for number, lane in enumerate(LANES):
        yield _event("M", "thread_name", 0, lane, args={"name": lane})
        yield _event("M", "thread_sort_index", 0, lane, args={"sort_index": number})


def _event(kind: str, name: str, us: float, lane: str = LANES[0], **more: Any) -> dict[str, Any]:
    number = LANES.index(lane) + 1
    return {"ph": kind, "name": name, "ts": round(us, 3), "pid": ENGINE, "tid": number, **more}


def _slice(lane: str, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    """It may not begin before the trace does: viewers want no negative time. Nor may it reach into
    the next one by a digit that was cut."""
    start = max(start, 0.0)
    dur = round(max(round(end, 3) - round(start, 3), 0.0), 3)
    return _event("X", name, start, lane, dur=dur, **more)


def _slot(lane: str, step: int, start: float, end: float, **more: Any) -> dict[str, Any]:
    letter, colour = SLOTS[step % 2]
    args = {"step": step, **more}
    return _slice(lane, f"slot {letter} step {step}", start, end, cname=colour, args=args)


def _host(trace: EngineTrace) -> Events:
    for span in trace.device_trace.spans:
        if not span.lane and span.phase in OF_PHASES:
            times = trace.us(span.start_ns), trace.us(span.end_ns)
            yield _slice(OF_PHASES[span.phase], span.name.strip(), *times)


def _steps(trace: EngineTrace) -> Events:
    for step in trace.steps:
        told = {"kind": step.kind, "rows": step.rows, "tokens": step.tokens}
        for start, end in step.intervals:
            yield _slot("compute", step.number, trace.us(start), trace.us(end), **told)


def _streams(done: Iterable[Work]) -> Events:
    """Kernels overlap where one is launched while the one in front still runs: slices may not."""
    until: dict[str, float] = {}
    kernels = 0
    for work in done:
        lane = OF_STREAMS[work.lane]
        start = max(work.start_us, until.get(lane, 0.0))
        kernels += lane == "kernels"
        if work.end_us <= start or (lane == "kernels" and kernels > MAX_KERNELS):
            continue
        until[lane] = work.end_us
        if work.step is None or lane == "kernels":
            args = {"step": work.step, "us": round(work.end_us - work.start_us, 3)}
            yield _slice(lane, work.name, start, work.end_us, args=args)
        else:
            yield _slot(lane, work.step, start, work.end_us, name=work.name)


def _bubbles(trace: EngineTrace, done: Iterable[Work]) -> Events:
    busy = merged((work.start_us, work.end_us) for work in done if work.lane == "compute")
    for step in trace.steps:
        yield from _idle_before(trace, step)
        for start_ns, end_ns in step.intervals:
            for start, end in _gaps(trace.us(start_ns), trace.us(end_ns), busy):
                if end - start >= SHORTEST_GAP_US:
                    args = {"step": step.number}
                    yield _slice("bubbles", "no kernel runs", start, end, args=args)


def _idle_before(trace: EngineTrace, step: Step) -> Events:
    """A bubble ends with the step's begin; where sampling waited for masks, part of it lies
    between."""
    idle = [(a[1], b[0]) for a, b in zip(step.intervals, step.intervals[1:], strict=False)]
    before = step.bubble_ns - sum(end - start for start, end in idle)
    begin = step.intervals[0][0]
    for start, end in [(begin - before, begin), *idle]:
        if end > start:
            args = {"step": step.number}
            yield _slice("bubbles", "bubble", trace.us(start), trace.us(end), args=args)


def _gaps(start: float, end: float, busy: Sequence[Interval]) -> Iterator[Interval]:
    """What of a time lies outside of the others. busy: in order, apart from each other."""
    at = start
    for index in range(bisect_right(busy, start, key=itemgetter(1)), len(busy)):
        begin, over = busy[index]
        if begin >= end:
            break
        if begin > at:
            yield at, begin
        at = over
    if at < end:
        yield at, end


def _hazards(trace: EngineTrace, profile: Profile | None) -> list[str]:
    """What should not happen under traffic, each with how often it did."""
    found = profile.violations() if profile is not None else []
    if trace.compiled:
        found.append(f"a kernel compiled or loaded ({trace.compiled} times)")
    return found


def _problems(trace: EngineTrace, profile: Profile | None) -> Events:
    if profile is None:
        return
    shift = profile.offset_us + trace.began_ns / 1e3
    for problem, event in profile.problems():
        at, args = max(event.ts - shift, 0.0), {"us": event.dur}
        yield _event("i", problem, at, "hazards", s="t", args=args)


def _requests(trace: EngineTrace) -> Events:
    """Each from its arrival to its first token: as a slice, and as an arrow from where it was
    received, by way of the step that sampled its token, to where that was delivered."""
    begins = {step.number: step.intervals[0][0] for step in trace.steps}
    spans = trace.device_trace.spans
    received = [(span.start_ns, span.end_ns) for span in spans if span.phase == "receive"]
    for number, request in enumerate(trace.requests):
        if request.step not in begins or not request.first_ns:
            continue
        arrived, first = trace.us(request.arrived_ns), trace.us(request.first_ns)
        common: dict[str, Any] = {"id": number, "args": {"request": request.name}}
        yield _event("b", "request", arrived, cat="request", **common)
        yield _event("e", "request", first, cat="request", **common)
        place = bisect_right(received, request.arrived_ns, key=itemgetter(0)) - 1
        if place >= 0 and request.arrived_ns <= received[place][1]:
            arrow = common | {"cat": "first token"}
            yield _event("s", "first token", arrived, "CPU schedule", **arrow)
            begin = trace.us(begins[request.step])
            yield _event("t", "first token", begin, "compute", **arrow)
            yield _event("f", "first token", first, "CPU deliver", bp="e", **arrow)

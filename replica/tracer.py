"""Keeps what an engine does in some steps, when it is asked to, and writes that to files.

What becomes of the files is `replica.timeline`'s business, in another process: to make a timeline
takes longer than a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from replica.device.stream import Device
from replica.messages import Output, Trace, Traced, TraceOutcome
from replica.scheduling.batch import Batch, StepOutput
from replica.scheduling.sequence import Key
from replica.timeline.engine_trace import PROFILE, EngineTrace, Request, Step

logger = logging.getLogger(__name__)


class Tracer:
    """Of one engine. Without a trace, each call returns at once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: _Open | None = None
        self.ended: tuple[Traced, ...] = ()
        """To be told with the next report."""

    def start(self, trace: Trace, step: int, bubble_ns: int) -> None:
        """step: the first that is traced. bubble_ns: the engine's, up to it."""
        if self._open is not None:
            self._end(trace, "busy")
            return
        try:
            self._device.start_trace()
        except RuntimeError as error:
            logger.warning("Nothing can be traced: %s", error)
            self._end(trace, "failed")
            return
        self._open = _Open(trace, step, bubble_ns, self._device.num_compiled())

    def arrived(self, key: Key) -> None:
        """A sequence is here, and waits or runs from now on."""
        if self._open is not None:
            self._open.requests[key] = Request(key[0], time.perf_counter_ns())

    def computed(
        self, batch: Batch, intervals: list[tuple[int, int]], bubble_ns: int, *, replayed: bool
    ) -> None:
        """A step was collected. bubble_ns: the engine's so far. replayed: from a graph."""
        if self._open is not None:
            self._open.computed(batch, intervals, bubble_ns, replayed=replayed)

    def delivered(self, step: StepOutput | None, outputs: Iterable[Output]) -> tuple[Traced, ...]:
        """What a step has brought is on its way to its readers. Returns what is to go with it."""
        if self._open is not None and step is not None:
            self._open.delivered(outputs, step.batch.step)
        ended, self.ended = self.ended, ()
        return ended

    def end_turn(self) -> None:
        """Between steps: a trace that is complete is written."""
        if self._open is None or not self._open.is_over:
            return
        ended, self._open = self._open, None
        try:
            ended.write(self._device)
        except (OSError, RuntimeError) as error:
            logger.warning("No trace was written: %s", error)
            self._end(ended.trace, "failed")
        else:
            self._end(ended.trace, "written")

    def _end(self, trace: Trace, outcome: TraceOutcome) -> None:
        self.ended = (*self.ended, Traced(folder=trace.folder, outcome=outcome))


class _Open:
    """One trace."""

    def __init__(self, trace: Trace, step: int, bubble_ns: int, compiled: int) -> None:
        self.trace = trace
        self.requests: dict[Key, Request] = {}
        self._steps: list[Step] = []
        self._first, self._last = step, step + trace.steps - 1
        self._bubble_ns, self._compiled = bubble_ns, compiled
        self._began_ns = time.perf_counter_ns()
        self._until_ns = self._began_ns + round(trace.seconds * 1e9)
        self._complete = False

    @property
    def is_over(self) -> bool:
        return self._complete or time.perf_counter_ns() >= self._until_ns

    def computed(
        self, batch: Batch, intervals: list[tuple[int, int]], bubble_ns: int, *, replayed: bool
    ) -> None:
        bubble_ns, self._bubble_ns = bubble_ns - self._bubble_ns, bubble_ns
        if batch.step < self._first:
            return
        if batch.step == self._first:
            bubble_ns = 0  # it waited for the profiler, which takes seconds to start
        kind = "decode" if batch.decodes_only else "mixed"
        way = "graph" if replayed else "eager"
        rows, tokens = len(batch.rows), batch.num_tokens
        self._steps.append(Step(batch.step, f"{kind} {way}", rows, tokens, intervals, bubble_ns))
        self._complete = batch.step >= self._last

    def delivered(self, outputs: Iterable[Output], step: int) -> None:
        now = time.perf_counter_ns()
        for output in outputs:
            request = self.requests.get((output.request_id, output.attempt))
            if request is not None and output.token_ids and not request.first_ns:
                request.first_ns, request.step = now, step

    def write(self, device: Device) -> None:
        """Ends it. Raises OSError or RuntimeError."""
        ended_ns, folder = time.perf_counter_ns(), Path(self.trace.folder)
        trace = EngineTrace(
            device.memory.type,
            self._began_ns,
            ended_ns,
            device.stop_trace(folder / PROFILE),
            self._steps,
            list(self.requests.values()),
            device.num_compiled() - self._compiled,
        )
        trace.write(folder)

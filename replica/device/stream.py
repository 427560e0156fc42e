"""Streams and events: the order of work on a device, independent of the CPU that enqueues it.

Two small interfaces, with the meaning that CUDA gives them, so that one pipeline runs over
both: work on a stream runs in order; a wait makes a stream wait for the newest record of an
event *so far*, and for nothing if there was none. Here they are implemented by host threads:
torch's CPU operators release the interpreter lock, so the overlap, and any race, is real.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import numpy as np
import torch

from replica.device.span_log import SpanLog
from replica.timeline.engine_trace import DeviceTrace

Work: TypeAlias = Callable[[], None]


class StreamFailure(RuntimeError):
    """Work on a stream raised; everything behind it was skipped. The engine is lost."""


class Stream(Protocol):
    """A queue of device work."""

    def run(self, work: Work) -> None:
        """Enqueue; never blocks on work enqueued before."""

    def close(self) -> None:
        """Let enqueued work finish, then give the stream up."""


class Event(Protocol):
    """A point in a stream that other streams, and the CPU, can wait for."""

    def record(self) -> None:
        """Enqueue the point behind the work that the event's stream holds now."""

    def block(self, stream: Stream) -> None:
        """Make later work of `stream` wait for the newest record. No record, no wait."""

    def synchronize(self) -> None:
        """Block the CPU until the newest record is reached. Raises StreamFailure."""

    def time_ns(self) -> int:
        """When the newest record was reached, on the clock of time.perf_counter_ns."""


class Device(Protocol):
    """Where streams, events and memory come from."""

    memory: torch.device
    """The device that holds weights, inputs and state."""
    pinned: bool
    """Host buffers that streams copy from and to must be page-locked."""

    def stream(self, name: str) -> Stream:
        """The stream of that name."""

    def event(self, stream: Stream, *, timed: bool = False) -> Event:
        """An event to be recorded on `stream` only. `time_ns` needs a timed one."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between host and device, as work of a stream. Of equal shape and type."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Names what is enqueued inside, for a profiler. name: "PHASE", or "PHASE STEP"."""

    def start_trace(self) -> None:
        """Keep what spans and streams do from now on. Raises RuntimeError where that fails."""

    def stop_trace(self, profile: Path) -> DeviceTrace:
        """What they have done. What a GPU did is written to `profile`. Raises RuntimeError or
        OSError where that fails."""

    def settle(self) -> None:
        """Block until all work enqueued so far is done. For the start of an engine only."""

    def give_back(self) -> None:
        """Return memory that nobody holds any more. For the start of an engine only."""

    def num_compiled(self) -> int:
        """Kernels that were compiled or loaded so far, each of which has held its caller up."""


class _Point:
    """One record of an event."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.time_ns = 0
        self.failure: BaseException | None = None


class HostStream:
    """A FIFO worker thread. `delay`, if given, runs before each piece of work (race tests)."""

    def __init__(self, name: str, log: SpanLog, delay: Work | None = None) -> None:
        self._queue: SimpleQueue[Work | _Point | None] = SimpleQueue()
        self._name, self._log, self._delay = name, log, delay
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Work) -> None:
        self._queue.put(self._log.timed(self._name, work))

    def wait_for(self, point: _Point) -> None:
        self._queue.put(lambda: _await(point))

    def mark(self, point: _Point) -> None:
        self._queue.put(point)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    @torch.inference_mode()  # per thread: nothing on a stream is ever differentiated
    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Point):
                item.failure = self._failure
                item.time_ns = time.perf_counter_ns()
                item.reached.set()
            elif self._failure is None:
                self._run(item)

    def _run(self, work: Work) -> None:
        try:
            if self._delay is not None:
                self._delay()
            work()
        except BaseException as failure:
            self._failure = failure


class HostEvent:
    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self._newest: _Point | None = None

    def record(self) -> None:
        self._newest = _Point()
        self._stream.mark(self._newest)

    def block(self, stream: Stream) -> None:
        point = self._newest
        assert isinstance(stream, HostStream)
        if point is not None:
            stream.wait_for(point)

    def synchronize(self) -> None:
        if self._newest is not None:
            _await(self._newest)

    def time_ns(self) -> int:
        if self._newest is None:
            raise ValueError("the event was never recorded")
        _await(self._newest)
        return self._newest.time_ns


def _await(point: _Point) -> None:
    point.reached.wait()
    if point.failure is not None:
        raise StreamFailure(f"work on a stream failed: {point.failure!r}") from point.failure


class HostDevice:
    """Host threads as streams, for engines on a CPU."""

    memory = torch.device("cpu")
    pinned = False

    def __init__(self, delay: Work | None = None) -> None:
        self._delay = delay
        self._log = SpanLog()

    def stream(self, name: str) -> HostStream:
        return HostStream(name, self._log, self._delay)

    def event(self, stream: Stream, *, timed: bool = False) -> HostEvent:
        assert isinstance(stream, HostStream)
        return HostEvent(stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # Not torch's copy: that would give this thread a team of OpenMP threads of its own. With
        # more of them than cores, libgomp lets those of the compute stream sleep at each barrier.
        np.copyto(target.numpy(), source.numpy())

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._log.span(name) if self._log.on else nullcontext()

    def start_trace(self) -> None:
        self._log.start()

    def stop_trace(self, profile: Path) -> DeviceTrace:
        """Work on host streams is kept beside the spans: there is nothing for `profile`."""
        return DeviceTrace(self._log.stop())

    def settle(self) -> None:
        """Host memory is there when its allocation returns."""

    def give_back(self) -> None:
        gc.collect()

    def num_compiled(self) -> int:
        """A CPU's kernels are loaded before the engine starts."""
        return 0

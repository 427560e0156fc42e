"""CUDA behind the interfaces of `replica.device.stream`, and the recorder behind
`replica.device.graph_pool`.

Work is enqueued by the thread that calls `run`, so a stream here is a CUDA stream and nothing
else. It knows streams, events and graphs, not what runs in them.
"""

from __future__ import annotations

import contextlib
import gc
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from replica.device.gpu_trace import GpuProfiler
from replica.device.span_log import SpanLog
from replica.device.stream import Stream, StreamFailure, Work
from replica.timeline.engine_trace import STREAMS, DeviceTrace

WARM_UP_RUNS = 2
"""Runs before a recording: the first compiles kernels and chooses algorithms, the last is timed."""

NAP_S, AWAKE_S = 50e-6, 300e-6
"""A thread that waits for an event sleeps for NAP_S at a time, and polls within AWAKE_S of the time
at which the event is expected."""


class CudaStream:
    """A stream of its own: never the default one, with which nothing here synchronises."""

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw
        self._default = torch.cuda.default_stream(raw.device)

    def run(self, work: Work) -> None:
        # Cheaper than the context manager of torch, which asks for the current stream first.
        torch.cuda.set_stream(self.raw)
        try:
            work()
        finally:
            torch.cuda.set_stream(self._default)

    def close(self) -> None:
        self.raw.synchronize()


class CudaEvent:
    def __init__(self, stream: CudaStream, clock: CudaClock, *, timed: bool) -> None:
        self._stream = stream.raw
        self._clock = clock
        self._event = torch.cuda.Event(enable_timing=timed)
        self._recorded = False
        self._usual_s = 0.0

    def record(self) -> None:
        self._event.record(self._stream)
        self._recorded = True

    def block(self, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        stream.raw.wait_event(self._event)

    def synchronize(self) -> None:
        # The driver would spin, a core for nothing, or sleep until an interrupt, and wake late.
        # Naps cost little; about the time that the last wait took, this does not sleep either.
        began = time.perf_counter()
        try:
            while not self._event.query():
                if abs(time.perf_counter() - began - self._usual_s) > AWAKE_S:
                    time.sleep(NAP_S)
        except RuntimeError as failure:
            raise StreamFailure(f"work on the GPU failed: {failure}") from failure
        self._usual_s = time.perf_counter() - began

    def time_ns(self) -> int:
        """Of an event that was reached: of a collected step, say."""
        if not self._recorded:
            raise ValueError("the event was never recorded")
        return self._clock.time_ns(self._event)


class CudaClock:
    """Maps CUDA event times to the clock of time.perf_counter_ns.

    CUDA tells the milliseconds between two events as a float32, exact to a microsecond for some
    ten seconds. So the event to count from is replaced now and then, by one that was recorded
    while its stream was idle, for which the host knows the time.
    """

    MAX_AGE_MS = 1000.0

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream.raw
        self._anchor, self._anchor_ns = self._mark()
        self._anchor.synchronize()
        self._next: tuple[torch.cuda.Event, int] | None = None

    def time_ns(self, event: torch.cuda.Event) -> int:
        age_ms = float(self._anchor.elapsed_time(event))
        result = self._anchor_ns + round(age_ms * 1e6)
        if self._next is not None and self._next[0].query():  # no wait
            (self._anchor, self._anchor_ns), self._next = self._next, None
        elif self._next is None and age_ms > self.MAX_AGE_MS:
            self._next = self._mark()
        return result

    def _mark(self) -> tuple[torch.cuda.Event, int]:
        event = torch.cuda.Event(enable_timing=True)
        now_ns = time.perf_counter_ns()
        event.record(self._stream)
        return event, now_ns


class NvtxRange(AbstractContextManager[None]):
    """Nsight shows what is enqueued inside. torch's own costs a generator each time."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *failure: object) -> None:
        torch.cuda.nvtx.range_pop()


class CudaDevice:
    """One GPU. Streams are made once per name, so that all engines of a process share them."""

    pinned = True

    def __init__(self, index: int = 0) -> None:
        # Triton is installed where there is a GPU only.
        import triton

        self.memory = torch.device("cuda", index)
        torch.cuda.set_device(self.memory)
        self._streams: dict[str, CudaStream] = {}
        self._log = SpanLog()
        self._profiler: GpuProfiler | None = None
        # Uploads are short and wait for nothing: that stream is idle nearly always.
        self._clock = CudaClock(self.stream("h2d"))
        self._compiled = 0
        self._other_hook = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._count_compiled

    def stream(self, name: str) -> CudaStream:
        if name not in self._streams:
            self._streams[name] = CudaStream(torch.cuda.Stream(self.memory))
        return self._streams[name]

    def event(self, stream: Stream, *, timed: bool = False) -> CudaEvent:
        assert isinstance(stream, CudaStream)
        return CudaEvent(stream, self._clock, timed=timed)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._log.span(name) if self._log.on else NvtxRange(name)

    def start_trace(self) -> None:
        self._profiler = GpuProfiler([self.stream(name) for name in STREAMS])
        self._log.start()

    def stop_trace(self, profile: Path) -> DeviceTrace:
        """Waits for what is enqueued, and writes for as long as there is much to tell: a second for
        100,000 kernels and calls, say."""
        profiler, self._profiler = self._profiler, None
        spans = self._log.stop()
        assert profiler is not None
        return DeviceTrace(spans, profiler.marks_ns, profiler.stop(profile))

    def settle(self) -> None:
        torch.cuda.synchronize(self.memory)

    def give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def num_compiled(self) -> int:
        return self._compiled

    def _count_compiled(self, **about: Any) -> Any:
        """Triton's hook: a kernel was compiled, or taken from the cache on disk."""
        self._compiled += 1
        return self._other_hook(**about) if self._other_hook is not None else None

    def free_bytes(self) -> int:
        """Memory that no process has taken from the device."""
        free, _ = torch.cuda.mem_get_info(self.memory)
        return int(free)

    def total_bytes(self) -> int:
        _, total = torch.cuda.mem_get_info(self.memory)
        return int(total)


class CudaRecording:
    """A CUDA graph, instantiated."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph = graph
        self.capture_ms = self.instantiate_ms = self.eager_ms = self.replay_ms = 0.0
        self.memory_bytes = 0

    def replay(self) -> None:
        self.graph.replay()


class CudaRecorder:
    """Captures work of the current stream into graphs that share one memory pool.

    Graphs of one pool may be replayed one after the other only, and what one leaves in the pool
    the next overwrites: results belong into buffers from outside.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> CudaRecording:
        for _ in range(WARM_UP_RUNS):
            eager_ms = self.timed_ms(work)
        free = self._device.free_bytes()
        recording = CudaRecording(torch.cuda.CUDAGraph(keep_graph=True))
        recording.eager_ms = eager_ms
        recording.capture_ms = self.timed_ms(lambda: self._capture(recording.graph, work))
        recording.instantiate_ms = self.timed_ms(recording.graph.instantiate)
        recording.replay()
        recording.replay_ms = self.timed_ms(recording.replay)
        recording.memory_bytes = free - self._device.free_bytes()
        return recording

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Work) -> None:
        # Thread-local: CUDA calls of other threads do not spoil the capture.
        # No collection: it might free what must not be freed while a stream captures.
        gc.disable()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
            graph.capture_end()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        finally:
            gc.enable()

    def timed_ms(self, work: Work) -> float:
        """Milliseconds from an idle device until it is idle again."""
        self._device.settle()
        began = time.perf_counter()
        work()
        self._device.settle()
        return (time.perf_counter() - began) * 1e3

"""Records what a GPU does, by torch's profiler. `replica.timeline.profile` reads it.

A profiled step is slower, so that shares and counts are to be read there, not times. An
engine that was profiled is slower for some time afterwards (docs/performance.md).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from replica.device.stream import Device, Stream
from replica.timeline.profile import Profile, read_profile

SPAN = "profiled"


class GpuProfiler:
    """One recording."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        """Starts. Raises RuntimeError where there is no profiling."""
        # Of operators of torch nothing is kept: that would slow the host's launches down.
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        try:
            self._profile.start()
        except AssertionError as error:  # torch was built without, say
            raise RuntimeError(f"torch does not profile here: {error}") from error
        self._before = _num_allocations()
        marks = []
        for stream in streams:
            began_ns = time.perf_counter_ns()
            stream.run(lambda: torch.cuda._sleep(1000))
            marks.append((began_ns + time.perf_counter_ns()) // 2)
        self.marks_ns = tuple(marks)
        """The middle of a launch on each stream that the profile shows, too."""

    def stop(self, path: Path) -> int:
        """Writes the file. Returns how often memory was allocated, on the device or page-locked on
        the host."""
        allocations = _num_allocations() - self._before
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))
        return allocations


def record(device: Device, step: Callable[[], None], steps: int = 50) -> Profile:
    """Run `step` so many times under the profiler."""
    device.settle()
    device.start_trace()
    with device.span(SPAN):
        for _ in range(steps):
            step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        return read_profile(path, device.stop_trace(path))


def _num_allocations() -> int:
    pinned = torch.cuda.host_memory_stats()
    on_device = torch.cuda.memory_stats()
    return int(pinned.get("num_host_alloc", 0) + on_device.get("num_device_alloc", 0))

"""What a GPU did while some steps ran, by torch's profiler, and what it should not have done.

For tests and benchmarks: a profiled step is slower, so that shares and counts are to be read here,
not times. It knows the rules of streams (`replica.pipeline`), not what the kernels compute.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from replica.device.cuda import CudaDevice

STREAMS = ("h2d", "compute", "d2h")
SPAN = "profiled steps"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
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


@dataclass(frozen=True, slots=True)
class Trace:
    """A profile of `steps` steps. Times in microseconds."""

    steps: int
    streams: frozenset[int]
    """The profiler's numbers for the three streams."""
    device: list[dict[str, Any]]
    """Kernels, copies and memsets, in order of time."""
    calls: list[str]
    """Names of CUDA calls that the host made."""
    allocations: int
    """How often memory was allocated, on the device or page-locked on the host."""

    @property
    def span_us(self) -> float:
        """From the first kernel's start to the last one's end."""
        return max(_end(event) for event in self.device) - float(self.device[0]["ts"])

    @property
    def idle_share(self) -> float:
        """Share of the span in which no kernel or copy ran at all."""
        busy, until = 0.0, -1.0
        for event in self.device:
            start, end = max(float(event["ts"]), until), _end(event)
            busy += max(0.0, end - start)
            until = max(until, end)
        return 1 - busy / self.span_us

    def violations(self) -> list[str]:
        """Each rule that was broken, in words; empty for a clean pipeline."""
        found = Counter(_problems(self.device, self.streams))
        calls = Counter(self.calls)
        for name, count in calls.items():
            if name in BLOCKING or name.startswith(("cudaMemcpy2D", "cuMemcpy")):
                found[f"a blocking call: {name}"] += count
        if self.allocations:
            found["an allocation of device or pinned memory"] += self.allocations
        return [f"{problem} ({count} times)" for problem, count in sorted(found.items())]


def _num_allocations() -> int:
    pinned = torch.cuda.host_memory_stats()
    on_device = torch.cuda.memory_stats()
    return int(pinned.get("num_host_alloc", 0) + on_device.get("num_device_alloc", 0))


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _problems(device: Iterable[dict[str, Any]], streams: frozenset[int]) -> Iterable[str]:
    for event in device:
        if event["args"]["stream"] not in streams:
            yield f"outside the three streams: {event['name'][:80]}"
        if "Pageable" in event["name"]:
            yield f"a pageable copy: {event['name']}"


def record(device: CudaDevice, step: Callable[[], None], steps: int = 50) -> Trace:
    """Run `step` so many times under the profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for name in STREAMS:
            device.stream(name).run(lambda: torch.cuda._sleep(1000))
            device.settle()
        before = _num_allocations()
        with record_function(SPAN):
            for _ in range(steps):
                step()
        allocations = _num_allocations() - before
        device.settle()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _read(events, steps, allocations)


def _read(events: list[dict[str, Any]], steps: int, allocations: int) -> Trace:
    timed = sorted((event for event in events if "dur" in event), key=lambda event: event["ts"])
    span = next(e for e in timed if e["name"] == SPAN and e.get("cat") == "user_annotation")
    device = [event for event in timed if event.get("cat") in ON_DEVICE]
    marks = [event for event in device if MARK in event["name"]]
    calls = [
        event["name"]
        for event in timed
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and span["ts"] <= event["ts"] < _end(span)
    ]
    return Trace(
        steps=steps,
        streams=frozenset(event["args"]["stream"] for event in marks),
        device=[event for event in device if event["ts"] > marks[-1]["ts"]],
        calls=calls,
        allocations=allocations,
    )

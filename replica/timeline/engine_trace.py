"""What is kept of some steps of an engine while they are traced. Times are nanoseconds on the clock
of time.perf_counter_ns."""

from __future__ import annotations

from pathlib import Path

import msgspec

STREAMS = ("h2d", "compute", "d2h")
"""The streams of a pipeline, by their names."""
TRACE, PROFILE = "trace.msgpack", "profile.json"
"""Files of a traced engine in the folder that it was given; the second one of a GPU only, as
torch's profiler writes it."""


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that took time on the host: of its step loop, or work on a host stream."""

    lane: str
    """Empty for the step loop, else the name of the stream."""
    name: str
    """As `Device.span` was given it: "launch 12" is of step 12. Work of a stream has the name of
    the span that enqueued it."""
    start_ns: int
    end_ns: int

    @property
    def phase(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def step(self) -> int | None:
        number = self.name.partition(" ")[2]
        return int(number) if number else None


class DeviceTrace(msgspec.Struct, frozen=True):
    """What a device saw."""

    spans: list[Span]
    marks_ns: tuple[int, ...] = ()
    """Of a GPU: the middle of the launch of a mark on each of `STREAMS`, which its profile shows,
    too."""
    allocations: int = 0
    """How often memory was allocated, on a GPU or page-locked on the host."""


class Step(msgspec.Struct, frozen=True):
    """A step that was collected."""

    number: int
    kind: str
    rows: int
    tokens: int
    intervals: list[tuple[int, int]]
    """When the device computed it: two where sampling waited for masks."""
    bubble_ns: int
    """How long the device was idle before it, and between its intervals, although there was
    work."""


class Request(msgspec.Struct):
    """A sequence that arrived."""

    name: str
    arrived_ns: int
    first_ns: int = 0
    """When its first token was delivered; 0 if it was not."""
    step: int = 0
    """The step that sampled it."""


class EngineTrace(msgspec.Struct, frozen=True):
    """All that was kept."""

    device: str
    """Its type: "cpu" or "cuda"."""
    began_ns: int
    ended_ns: int
    device_trace: DeviceTrace
    steps: list[Step]
    requests: list[Request]
    compiled: int
    """Kernels compiled or loaded meanwhile."""

    def us(self, ns: int) -> float:
        """Microseconds since it began."""
        return (ns - self.began_ns) / 1e3

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        (folder / TRACE).write_bytes(msgspec.msgpack.encode(self))

    @classmethod
    def read(cls, folder: Path) -> EngineTrace:
        """Raises OSError, msgspec.DecodeError."""
        return msgspec.msgpack.decode((folder / TRACE).read_bytes(), type=cls)

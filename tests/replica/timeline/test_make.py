"""The timeline of a GPU, from a profile as torch writes it: by streams, by steps, with hazards."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replica.timeline.engine_trace import PROFILE, DeviceTrace, EngineTrace, Request, Span, Step
from replica.timeline.make import TIMELINE, make
from replica.timeline.profile import read_profile
from tests import timelines

OFFSET_US = 5_000_000.0
"""The profiler's clock, less the host's."""
STREAMS = {7: "h2d", 9: "compute", 5: "d2h"}
"""By the profiler's numbers, in the order of marks."""


class Steps:
    """Events of a profile and spans of a trace. Times: microseconds on the host's clock."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.spans: list[Span] = []
        self.steps: list[Step] = []
        self.requests: list[Request] = []
        self.marks: list[int] = []
        self._correlation = 0
        # The last mark runs first.
        for place, stream in enumerate(STREAMS):
            self.marks.append(1000 * (10 * place + 2) + 500)
            self.run("spin_kernel(long)", stream, 40 - place, 1, called=10 * place + 2)

    def run(self, name: str, stream: int, at: float, us: float, called: float) -> None:
        """A kernel or copy, and the call that launched it."""
        self._correlation += 1
        kind = "gpu_memcpy" if "Memcpy" in name else "kernel"
        args = {"stream": stream, "correlation": self._correlation, "device": 0}
        self._add(name, kind, at, us, args)
        self.call("cudaLaunchKernel", called, correlation=self._correlation)

    def call(self, name: str, at: float, **args: Any) -> None:
        self._add(name, "cuda_runtime", at, 1.0, args)

    def _add(self, name: str, cat: str, at: float, us: float, args: dict[str, Any]) -> None:
        ts = at + OFFSET_US
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": us, "args": args})

    def step(self, number: int, kind: str, begin: int, end: int, bubble: int = 0) -> None:
        """Launched in the 80 microseconds before it begins."""
        launched = 1000 * (begin - 80), 1000 * (begin - 1)
        self.spans.append(Span("", f"launch {number}", *launched))
        times = [(1000 * begin, 1000 * end)]
        self.steps.append(Step(number, kind, 2, 2, times, 1000 * bubble))

    def trace(self, compiled: int = 0, allocations: int = 0) -> EngineTrace:
        seen = DeviceTrace(self.spans, tuple(self.marks), allocations)
        ended = max(span.end_ns for span in self.spans)
        return EngineTrace("cuda", 0, ended, seen, self.steps, self.requests, compiled)

    def write(self, folder: Path, **of_trace: int) -> None:
        self.trace(**of_trace).write(folder)
        other = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}
        sync = {
            "ph": "X",
            "cat": "cuda_sync",
            "name": "x",
            "ts": 1,
            "dur": 1,
            "args": {"stream": -1},
        }
        text = {"traceEvents": [other, sync, *self.events], "schemaVersion": 1}
        (folder / PROFILE).write_text(json.dumps(text))


def two_steps() -> Steps:
    """A decode step without gaps, and a mixed one that waits for its launches."""
    made = Steps()
    made.step(4, "decode graph", 200, 300)
    made.run("Memcpy HtoD (Pinned -> Device)", 7, 190, 5, called=130)
    for place in range(10):
        made.run("_attend", 9, 200 + 10 * place, 12 if place < 9 else 10, called=140)
    made.run("Memcpy DtoH (Device -> Pinned)", 5, 302, 3, called=150)
    made.step(5, "mixed eager", 400, 500, bubble=100)
    for place in range(4):
        made.run("gemm", 9, 405 + 25 * place, 10, called=330 + place)
    return made


def test_kernels_belong_to_the_steps_that_have_launched_them(tmp_path):
    two_steps().write(tmp_path)
    timeline = make(tmp_path, "llama on r1")
    timelines.check(timeline)
    assert [each["name"] for each in timelines.lane(timeline, "H2D")] == ["slot A step 4"]
    assert [each["name"] for each in timelines.lane(timeline, "D2H")] == ["slot A step 4"]
    assert [each["name"] for each in timelines.lane(timeline, "compute")] == [
        "slot A step 4",
        "slot B step 5",
    ]
    kernels = timelines.lane(timeline, "kernels")
    assert [each["args"]["step"] for each in kernels] == [4] * 10 + [5] * 4
    assert kernels[1]["args"]["us"] == 12, "all of it, though it began beside the one in front"
    assert kernels[1]["ts"] == pytest.approx(212)


def test_gaps_between_kernels_are_told_apart_from_bubbles(tmp_path):
    two_steps().write(tmp_path)
    timeline = make(tmp_path, "engine")
    shares = timeline["otherData"]["shares"]
    assert shares["decode graph"] == pytest.approx(
        {"steps": 1, "ms": 0.1, "kernels": 1.0, "gaps": 0.0, "bubble": 0.0}
    )
    assert shares["mixed eager"] == pytest.approx(
        {"steps": 1, "ms": 0.2, "kernels": 0.2, "gaps": 0.3, "bubble": 0.5}
    )
    drawn = [
        (each["name"], each["ts"], each["dur"]) for each in timelines.lane(timeline, "bubbles")
    ]
    assert drawn == [
        ("bubble", 300, 100),
        ("no kernel runs", 400, 5),
        ("no kernel runs", 415, 15),
        ("no kernel runs", 440, 15),
        ("no kernel runs", 465, 15),
        ("no kernel runs", 490, 10),
    ]


def test_time_between_forward_and_sampling_is_a_bubble(tmp_path):
    made = Steps()
    made.step(0, "decode eager", 200, 300)
    intervals = [(200_000, 250_000), (270_000, 300_000)]
    made.steps[0] = Step(0, "decode eager", 1, 1, intervals, 30_000)
    for at, us in ((200, 50), (270, 30)):
        made.run("kernel", 9, at, us, called=150)
    made.write(tmp_path)
    timeline = make(tmp_path, "engine")
    drawn = [(each["ts"], each["dur"]) for each in timelines.lane(timeline, "bubbles")]
    assert drawn == [(190, 10), (250, 20)]


def planted(made: Steps, hazard: str) -> None:
    at = 350
    match hazard:
        case "outside the three streams: add":
            made.run("add", 0, at, 5, called=335)
        case "a pageable copy: Memcpy HtoD (Pageable -> Device)":
            made.run("Memcpy HtoD (Pageable -> Device)", 7, at, 5, called=335)
        case hazard:
            made.call(hazard.removeprefix("a blocking call: "), 335)


@pytest.mark.parametrize(
    "hazard",
    [
        "outside the three streams: add",
        "a pageable copy: Memcpy HtoD (Pageable -> Device)",
        "a blocking call: cudaStreamSynchronize",
        "a blocking call: cudaMemcpy2DAsync",
    ],
)
def test_hazards_are_named_where_they_are_seen(tmp_path, hazard):
    made = two_steps()
    made.call("cudaDeviceSynchronize", 10)  # the recording's own, before the first span
    made.call("cudaDeviceSynchronize", 900)
    planted(made, hazard)
    made.write(tmp_path)
    timeline = make(tmp_path, "engine")
    timelines.check(timeline)
    assert timeline["otherData"]["hazards"] == [f"{hazard} (1 times)"]
    [seen] = timelines.of_kind(timeline["traceEvents"], "i")
    assert seen["name"] == hazard
    assert seen["ts"] in (335, 350)


def test_allocations_and_compilations_are_counted(tmp_path):
    two_steps().write(tmp_path, compiled=2, allocations=3)
    assert make(tmp_path, "engine")["otherData"]["hazards"] == [
        "an allocation of device or pinned memory (3 times)",
        "a kernel compiled or loaded (2 times)",
    ]


def test_a_clean_profile_has_no_hazards(tmp_path):
    made = two_steps()
    made.write(tmp_path)
    profile = read_profile(tmp_path / PROFILE, made.trace().device_trace)
    assert profile.violations() == []
    assert profile.lanes == STREAMS
    assert profile.offset_us == pytest.approx(OFFSET_US, abs=0.01)


def test_a_profile_without_marks_is_refused(tmp_path):
    made = two_steps()
    made.events = [event for event in made.events if "spin" not in event["name"]]
    made.write(tmp_path)
    with pytest.raises(ValueError, match="0 marks"):
        make(tmp_path, "engine")


def test_it_is_made_by_a_process_of_its_own_without_torch(tmp_path):
    """Which takes time from nobody's event loop, and is there at once."""
    two_steps().write(tmp_path)
    code = (
        "import sys; from replica.timeline.make import main; main(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), "<r1>"], check=True)
    made = json.loads(gzip.decompress((tmp_path / TIMELINE).read_bytes()))
    assert made == make(tmp_path, "<r1>")

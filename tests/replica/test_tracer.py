"""Steps of an engine are kept when that is asked for, and nothing is when it is not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from replica.device.stream import HostDevice
from replica.messages import Trace, Traced, decode_command, encode
from replica.timeline.engine_trace import EngineTrace
from replica.timeline.make import make
from tests import timelines
from tests.script import Bench, submit


def trace(folder: Path, steps: int = 8, seconds: float = 10.0) -> Trace:
    return Trace(folder=str(folder), steps=steps, seconds=seconds)


def traced(bench: Bench) -> list[Traced]:
    return [one for report in bench.channel.reports for one in report.traced]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_steps_become_a_timeline(bench, tmp_path, overlap):
    engine = bench(overlap=overlap)
    engine.send(submit("before", max_tokens=20))
    engine.step(3)
    engine.send(trace(tmp_path))
    engine.step()
    engine.run(submit("a", max_tokens=4), submit("b", max_tokens=20))
    assert traced(engine) == [Traced(folder=str(tmp_path), outcome="written")]
    timeline = make(tmp_path, "engine")
    timelines.check(timeline)
    steps = [each["args"]["step"] for each in timelines.lane(timeline, "compute")]
    assert len(steps) == 8
    assert steps == list(range(steps[0], steps[0] + 8))
    for name in ("CPU schedule", "CPU launch", "CPU wait for D2H", "CPU deliver", "kernels"):
        assert len(timelines.lane(timeline, name)) >= 8, name
    for name in ("H2D", "compute", "D2H"):
        slots = {
            each["args"]["step"] % 2: each["name"][:6] for each in timelines.lane(timeline, name)
        }
        assert slots == {0: "slot A", 1: "slot B"}
    arrows = timelines.of_kind(timeline["traceEvents"], "s")
    assert {each["args"]["request"] for each in arrows} == {"a", "b"}


def test_shares_add_up_and_tell_kinds_of_steps_apart(bench, tmp_path):
    engine = bench()
    engine.run(trace(tmp_path), submit("a", (5, 6, 7), max_tokens=9))
    shares = make(tmp_path, "engine")["otherData"]["shares"]
    assert list(shares) == ["decode eager", "mixed eager", "all"]
    assert (shares["decode eager"]["steps"], shares["mixed eager"]["steps"]) == (7, 1)
    for share in shares.values():
        assert share["kernels"] + share["gaps"] + share["bubble"] == pytest.approx(1)
        assert share["ms"] > 0


def test_time_without_work_on_the_compute_stream_is_a_bubble(bench, tmp_path):
    naps = 5

    class Slow(HostDevice):
        def copy(self, target, source):
            time.sleep(0.002)
            super().copy(target, source)

    engine = bench(device=Slow(), overlap=False)
    engine.run(trace(tmp_path, steps=naps + 1), submit("a", max_tokens=naps + 1))
    timeline = make(tmp_path, "engine")
    bubbles = [each for each in timelines.lane(timeline, "bubbles") if each["name"] == "bubble"]
    # The first step waited for the recording to begin.
    assert len(bubbles) == naps
    for each in bubbles:  # an upload and a download, each of 2 ms
        assert 4000 <= each["dur"] < 20_000
    share = timeline["otherData"]["shares"]["all"]
    assert share["bubble"] > 0.5 > share["kernels"]


def test_masks_are_waited_for_within_a_step(bench, tmp_path):
    """What lies between the forward pass and sampling is a bubble, and not a gap."""
    engine = bench()
    engine.run(trace(tmp_path, steps=3), submit("a", max_tokens=3, allowed_token_ids=(5, 6)))
    timelines.check(make(tmp_path, "engine"))


def test_a_trace_ends_by_time_where_steps_do_not_come(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("replica.engine.IDLE_REPORT_S", 0.0)
    engine = bench()
    engine.send(trace(tmp_path, seconds=0.0))
    engine.step(2)
    assert [one.outcome for one in traced(engine)] == ["written"]
    timeline = make(tmp_path, "engine")
    timelines.check(timeline)
    assert timeline["otherData"]["shares"]["all"]["steps"] == 0


def test_a_second_trace_at_a_time_is_refused_and_a_later_one_is_not(bench, tmp_path):
    engine = bench()
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    engine.run(*(trace(folder) for folder in folders[:2]), submit("a", max_tokens=20))
    engine.run(trace(folders[2]), submit("b", max_tokens=20))
    assert [(Path(one.folder).name, one.outcome) for one in traced(engine)] == [
        ("b", "busy"),
        ("a", "written"),
        ("c", "written"),
    ]
    assert not any(folders[1].iterdir())
    names = [request.name for request in EngineTrace.read(folders[2]).requests]
    assert names == ["b"], "nothing is left of the trace before"


def test_a_folder_that_is_gone_ends_the_trace_and_nothing_else(bench, tmp_path):
    engine = bench()
    found = engine.run(trace(tmp_path / "gone"), submit("a", max_tokens=20))
    assert [one.outcome for one in traced(engine)] == ["failed"]
    assert len(found["a"]) == 20


def test_a_device_that_cannot_record_fails_the_trace_and_nothing_else(bench, tmp_path):
    class Deaf(HostDevice):
        def start_trace(self) -> None:
            raise RuntimeError("no profiler here")

    engine = bench(device=Deaf())
    found = engine.run(trace(tmp_path), submit("a", max_tokens=20))
    assert [one.outcome for one in traced(engine)] == ["failed"]
    assert len(found["a"]) == 20


@pytest.mark.parametrize(
    "bounds", [{"steps": 0}, {"steps": 301}, {"seconds": -1.0}, {"seconds": 99.0}]
)
def test_a_trace_beyond_its_bounds_is_no_command(tmp_path, bounds):
    with pytest.raises(ValueError, match="Expected"):
        decode_command(encode(trace(tmp_path, **bounds)))

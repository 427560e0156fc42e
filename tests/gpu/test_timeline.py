"""A timeline of an engine on a GPU: kernels by steps, graphs and eager ones, and no hazards."""

from __future__ import annotations

import pytest

from replica.messages import Trace
from replica.timeline.make import make
from tests import timelines
from tests.gpu.engines import ROWS, bench
from tests.script import submit

STEPS = 40


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
def test_steps_become_a_timeline(runner, device, tmp_path, overlap):
    engine, _ = bench(runner, device, (ROWS,), eos_token_ids=(), overlap=overlap)
    common = {"max_tokens": 120, "ignore_eos": True}
    for turn in range(2):  # once untraced: first calls load modules
        engine.send(*(submit(f"{turn}.{i}", (3, i), **common) for i in range(6)))
        engine.step(5)
        if turn:
            engine.send(Trace(folder=str(tmp_path), steps=STEPS, seconds=10.0))
        engine.step(5)
        engine.send(submit(f"{turn}.late", tuple(range(40)), **common))
        engine.run()
    timeline = make(tmp_path, "engine")
    timelines.check(timeline)
    told = timeline["otherData"]
    assert told["hazards"] == []
    shares = told["shares"]
    assert shares["all"]["steps"] == STEPS
    assert shares["decode graph"]["steps"] > 30
    assert shares["mixed eager"]["steps"] >= 1
    assert shares["mixed eager"]["gaps"] > shares["decode graph"]["gaps"]
    for share in shares.values():
        assert 0 < share["kernels"] < 1
    steps = [each["args"]["step"] for each in timelines.lane(timeline, "compute")]
    kernels = timelines.lane(timeline, "kernels")
    assert {each["args"]["step"] for each in kernels} >= set(steps)
    for name in ("H2D", "D2H"):
        assert len(timelines.lane(timeline, name)) >= STEPS, name
    begins = {each["args"]["step"]: each["ts"] for each in timelines.lane(timeline, "compute")}
    for each in kernels:  # two clocks agree
        if each["args"]["step"] in begins:
            assert each["ts"] > begins[each["args"]["step"]] - 30
    engine.close()

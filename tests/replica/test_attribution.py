"""Whose the device's time was: nothing of it is lost, and nothing is booked twice."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.attribution import attribute_time
from replica.messages import Abort, Backlog
from replica.scheduling.batch import Batch
from replica.scheduling.rows import Rows
from tests.script import EOS, Bench, ScriptRunner, counting, submit


def rows_and_batch() -> tuple[Rows, Batch]:
    """A row that decodes, and one with a chunk of five prompt tokens."""
    batch = replace(
        Batch.padding(2), lengths=np.array([1, 5], np.int32), samples=np.array([0], np.intp)
    )
    return Rows(4, 64, 4, guard=0), batch


def test_an_output_token_costs_twice_a_prompt_token():
    rows, batch = rows_and_batch()
    assert attribute_time(rows, batch, padding=0, busy_ns=70) == pytest.approx(0)
    assert rows.gpu_ns.tolist() == pytest.approx([20, 50, 0, 0])
    attribute_time(rows, batch, padding=0, busy_ns=7)
    assert rows.gpu_ns.tolist() == pytest.approx([22, 55, 0, 0])


def test_padding_and_rows_that_had_ended_serve_nobody():
    rows, batch = rows_and_batch()
    rows.ended[1] = True
    assert attribute_time(rows, batch, padding=1, busy_ns=90) == pytest.approx(50 + 20)
    assert rows.gpu_ns.tolist() == pytest.approx([20, 0, 0, 0])


def test_a_row_computed_after_the_end_is_surplus():
    engine = Bench(ScriptRunner(lambda name, position: EOS if position == 5 else 9))
    engine.run(submit("a", max_tokens=30))
    assert engine.engine.stats().time.surplus > 0
    engine.close()


def test_a_bill_grows_from_output_to_output():
    engine = Bench(ScriptRunner())
    engine.run(submit("a", max_tokens=5))
    bills = [output.gpu_s for output in engine.reported]
    assert bills == sorted(set(bills))
    assert bills[0] > 0
    engine.close()


ARRIVALS = st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 3))
"""Prompt tokens, output tokens, steps until the next event."""
EVENTS = st.lists(
    st.one_of(
        ARRIVALS,
        st.tuples(st.just("abort"), st.integers(0, 9), st.integers(0, 2)),
        st.tuples(st.just("backlog"), st.booleans(), st.integers(0, 2)),
    ),
    max_size=12,
)


@given(events=EVENTS, overlap=st.booleans(), stop_at=st.integers(4, 40))
def test_the_outcomes_add_up_to_wall_time(events, overlap, stop_at):
    """Ended in whatever way + surplus + bubble + starved + spare = wall time: with aborts at any
    moment, preemptions (64 places for four rows) and sequences that end unforeseen."""

    def script(name: str, position: int) -> int:
        return EOS if position == stop_at else counting(name, position)

    bench = Bench(ScriptRunner(script), kv_tokens=64, overlap=overlap, max_step_tokens=8)
    for number, event in enumerate(events):
        match event:
            case ("abort", target, steps):
                bench.send(Abort(request_id=f"r{target}"))
            case ("backlog", waiting, steps):
                bench.send(Backlog(waiting=waiting))
            case (prompt, output, steps):
                bench.send(submit(f"r{number}", range(3, 3 + prompt), max_tokens=output))
        bench.step(steps)
    bench.run()
    before = time.perf_counter_ns()
    told = bench.engine.stats().time
    after = time.perf_counter_ns()
    ended = sum(output.gpu_s for output in bench.reported if output.finish_reason is not None)
    assert ended + told.surplus == pytest.approx(told.busy, abs=1e-9)
    classes = (ended, told.surplus, told.bubble, told.starved, told.spare)
    started_ns = bench.engine.idle.started_ns
    assert (before - started_ns) / 1e9 - 1e-9 <= sum(classes) <= (after - started_ns) / 1e9 + 1e-9
    assert min(classes) >= 0
    bench.close()

"""What an engine says about itself: counters, idle time, spans, fragmentation."""

from __future__ import annotations

import itertools
import time

import pytest

from replica.device.stream import HostDevice
from replica.messages import Abort, Backlog
from tests.script import Bench, ScriptRunner, submit

WAIT_S = 0.03


def test_counters_agree_with_what_was_reported():
    """C59: totals are sums over requests, aborted ones included; counters never fall."""
    engine = Bench(ScriptRunner(), kv_tokens=64)
    engine.send(*(submit(f"r{i}", range(3, 9), max_tokens=30) for i in range(6)))
    engine.step(5)
    engine.send(Abort(request_id="r1"), Abort(request_id="r5"))
    outputs = engine.run()
    stats = engine.engine.stats()
    assert stats.output_tokens == sum(map(len, outputs.values()))
    assert stats.finished == {"length": 4, "abort": 2}
    history = [report.stats for report in engine.channel.reports]
    for earlier, later in itertools.pairwise(history):
        assert earlier.output_tokens <= later.output_tokens
        assert earlier.prompt_tokens <= later.prompt_tokens
    assert (stats.running, stats.waiting) == (0, 0)
    engine.close()


def test_idle_time_is_classified_and_adds_up():
    engine = Bench(ScriptRunner())
    engine.run(submit("a", max_tokens=8))
    engine.send(Backlog(waiting=True))
    engine.step(3)
    engine.send(Backlog(waiting=False))
    engine.step(3)
    stats = engine.engine.stats()
    assert min(stats.time.busy, stats.time.bubble, stats.time.starved, stats.time.spare) > 0
    engine.close()


class SpanDevice(HostDevice):
    """Keeps the names of spans."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def span(self, name: str):
        self.names.append(name)
        return super().span(name)


def test_each_phase_of_each_step_has_a_span_for_a_profiler():
    device = SpanDevice()
    engine = Bench(ScriptRunner(), device=device)
    engine.run(submit("a", (1, 2), max_tokens=3))
    engine.close()
    phases = [name for name in device.names if name.endswith(" 1")]
    assert phases == ["schedule 1", "launch 1", "wait 1", "update 1", "deliver 1"]


def test_a_block_that_is_not_full_counts_as_fragmentation():
    engine = Bench(ScriptRunner(), block_size=4, prefix_cache=False)
    engine.send(submit("a", (1, 2, 3, 4, 5), max_tokens=9))
    engine.step(2)
    stats = engine.engine.stats()
    assert (stats.kv_slots, stats.kv_tokens) == (8, 6)
    engine.run()
    stats = engine.engine.stats()
    assert (stats.kv_slots, stats.kv_tokens) == (0, 0)
    engine.close()


def waits(engine: Bench, name: str) -> float:
    """Seconds that a request was queued, as each of its outputs says."""
    [told] = {output.queued_s for output in engine.reported if output.request_id == name}
    return told


@pytest.mark.parametrize("overlap", [True, False])
def test_the_wait_for_the_first_step_that_computes_is_told(overlap):
    """For a row, not for the prompt behind it; and once, whoever is preempted."""
    engine = Bench(ScriptRunner(), max_rows=1, overlap=overlap, max_step_tokens=2)
    engine.send(submit("first", range(3, 13), max_tokens=2), submit("second", max_tokens=3))
    engine.step()
    time.sleep(WAIT_S)
    engine.run()
    assert waits(engine, "first") < WAIT_S <= waits(engine, "second")
    engine.close()


def test_a_row_that_no_step_computes_for_still_waits():
    """A long prompt has all of the step's budget: the others have rows, and nothing more."""
    engine = Bench(ScriptRunner(), max_rows=2, max_step_tokens=2)
    engine.send(submit("long", range(3, 9), max_tokens=2), submit("short", max_tokens=2))
    engine.step()
    assert engine.engine.rows.num_used == 2
    time.sleep(WAIT_S)
    engine.run()
    assert waits(engine, "long") < WAIT_S <= waits(engine, "short")
    engine.close()


def test_a_preemption_is_no_second_wait():
    engine = Bench(ScriptRunner(), kv_tokens=64)
    engine.run(*(submit(f"r{i}", range(3, 9), max_tokens=30) for i in range(4)))
    assert engine.engine.stats().preemptions
    assert [waits(engine, f"r{i}") > 0 for i in range(4)] == [True] * 4
    engine.close()


def test_who_leaves_while_it_waits_has_no_wait():
    engine = Bench(ScriptRunner(), max_rows=1)
    engine.run(submit("a"), submit("b"), Abort(request_id="b"))
    assert waits(engine, "b") == 0
    engine.close()

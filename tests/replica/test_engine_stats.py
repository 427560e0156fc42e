"""What an engine says about itself: counters, idle time, spans, fragmentation."""

from __future__ import annotations

import itertools

from replica.device.stream import HostDevice
from replica.messages import Abort, Backlog
from tests.script import Bench, ScriptRunner, submit


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

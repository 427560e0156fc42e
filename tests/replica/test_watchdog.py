from __future__ import annotations

import pytest

from replica.messages import Stop
from replica.watchdog import EngineStalled, Watchdog
from tests.script import Bench, ScriptRunner, submit


def test_work_that_nobody_schedules_is_a_fault_with_its_state_in_the_message():
    engine = Bench(ScriptRunner())
    engine.engine.watchdog = Watchdog(stall_s=0.05)
    engine.engine.scheduler.schedule = lambda: None
    engine.send(submit("a"))
    with pytest.raises(EngineStalled, match="waiting=1"):
        engine.engine.run()
    engine.close()


def test_neither_a_slow_step_nor_an_idle_engine_is_one():
    runner = ScriptRunner(gated=True)
    engine = Bench(runner)
    engine.engine.watchdog = Watchdog(stall_s=0.02)
    forward = runner.forward

    def slowly(*args):
        import time

        time.sleep(0.05)
        return forward(*args)

    runner.forward = slowly
    runner.gate.release(100)
    engine.send(submit("a", max_tokens=3), Stop())
    engine.engine.run()
    assert engine.endings() == {"a": "length"}
    watchdog = Watchdog(stall_s=0.0)
    for _ in range(3):
        watchdog.check(5, dict, busy=False)

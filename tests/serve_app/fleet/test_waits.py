from __future__ import annotations

from router.messages import HeldBack
from serve_app.fleet.waits import ASKING, Waits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_second_has_the_reason_that_was_told_last() -> None:
    clock = Clock()
    waits = Waits(clock)
    with waits.waiting("m", "a") as waited:
        clock.now = 1.0
        waits.learn({"m": {"a": HeldBack.CONCURRENCY, "b": HeldBack.CAPACITY}})
        clock.now = 3.0
        with waits.waiting("m", "a") as later, waits.waiting("n", "a") as elsewhere:
            clock.now = 4.0
            waits.learn({"m": {"a": HeldBack.FAIR_SHARE}})
            clock.now = 8.0
            assert later() == {"concurrency": 1.0, "fair_share": 4.0}
            assert elsewhere() == {ASKING: 5.0}
        waits.learn({})
        clock.now = 9.0
        assert waited() == {ASKING: 2.0, "concurrency": 3.0, "fair_share": 4.0}


def test_a_tenant_that_waits_no_more_is_forgotten() -> None:
    """And what was told of it does not hold for what comes later."""
    clock = Clock()
    waits = Waits(clock)
    for _ in range(2):
        with waits.waiting("m", "a") as waited:
            clock.now += 1.0
            assert waited() == {ASKING: 1.0}
            waits.learn({"m": {"a": HeldBack.CAPACITY}})
    for number in range(1000):
        with waits.waiting("m", f"t{number}"):
            pass
    assert not waits._waits

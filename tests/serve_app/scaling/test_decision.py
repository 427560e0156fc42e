from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import isfinite

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serve_app.scaling.decision import desired_replicas
from serve_app.scaling.types import (
    Backlog,
    Decision,
    Load,
    ScalingLimits,
    ScalingState,
    Signals,
    read_limits,
)

QUIET = Backlog(seconds=(0.0,), waiting=0)
LIMITS = ScalingLimits(min_replicas=1, max_replicas=10)

shares = st.floats(0, 1)
loads = st.builds(
    Load, busy=shares, bubble=shares, starved=shares, spare=shares, work=shares, rows=shares,
    kv=shares,
)  # fmt: skip
backlogs = st.builds(
    Backlog,
    seconds=st.lists(st.floats(0, 1e4), max_size=4).map(tuple),
    waiting=st.integers(0, 10_000),
    missed=st.floats(0, 1e6),
    ended=st.floats(0, 1e6),
)


def at(level: float) -> Load:
    return Load(busy=level, spare=1 - level, work=level, rows=level)


def steady(count: int, level: float, **more: object) -> Signals:
    told = {"now": 0.0, "target": count, "running": count, "backlog": QUIET}
    return Signals(**(told | {"loads": (at(level),) * count} | more))  # type: ignore[arg-type]


@st.composite
def situations(draw: st.DrawFn) -> tuple[ScalingLimits, list[Signals]]:
    """Limits, and signals of a fleet in the order of time."""
    least = draw(st.integers(0, 5))
    limits = ScalingLimits(
        min_replicas=least,
        max_replicas=draw(st.integers(max(least, 1), 40)),
        hold_s=draw(st.floats(0, 60)),
        zero_hold_s=draw(st.floats(0, 60)),
        down_period_s=draw(st.floats(0, 20)),
    )
    now, told = 0.0, []
    for _ in range(draw(st.integers(1, 12))):
        now += draw(st.floats(0.0, 200))
        target = draw(st.integers(limits.min_replicas, limits.max_replicas))
        reported = draw(st.lists(loads, max_size=target))
        running = draw(st.integers(0, target))
        backlog = draw(st.none() | backlogs)
        told.append(
            Signals(now=now, target=target, running=running, loads=tuple(reported), backlog=backlog)
        )
    return limits, told


def decide(limits: ScalingLimits, told: list[Signals]) -> tuple[Decision, ScalingState]:
    """The last decision, and the state before it."""
    state = ScalingState()
    for signals in told[:-1]:
        state = desired_replicas(signals, limits, state).state
    return desired_replicas(told[-1], limits, state), state


def follow(
    signals_of: Callable[[float, int], Signals],
    limits: ScalingLimits = LIMITS,
    *,
    start: int = 1,
    seconds: int = 600,
) -> list[int]:
    """Replicas second by second, where each is up as soon as it is wanted."""
    state, target, course = ScalingState(), start, []
    for second in range(seconds):
        decision = desired_replicas(signals_of(float(second), target), limits, state)
        state, target = decision.state, decision.replicas
        course.append(target)
    return course


@given(situations())
def test_it_stays_within_the_limits_and_says_why(case: tuple[ScalingLimits, list[Signals]]) -> None:
    limits, told = case
    decision, _ = decide(limits, told)
    assert limits.min_replicas <= decision.replicas <= limits.max_replicas
    assert decision.reason
    assert decision.explain()["target"] == told[-1].target


@given(situations())
def test_it_is_pure(case: tuple[ScalingLimits, list[Signals]]) -> None:
    assert decide(*case) == decide(*case)


def test_signals_a_moment_apart_give_finite_means() -> None:
    """A backlog that appears within the smallest time a clock can tell grows at a finite rate."""
    busy = Backlog(seconds=(1.0,), waiting=1)
    course = [(0.0, QUIET), (5e-324, busy), (1e-300, QUIET), (10.0, busy)]
    told = [Signals(now=now, target=1, running=1, loads=(), backlog=it) for now, it in course]
    decision, state = decide(LIMITS, told)
    assert 1 <= decision.replicas <= 4
    assert isfinite(state.growth)
    assert isfinite(state.fast)


@given(situations(), st.booleans())
def test_it_never_shrinks_while_a_signal_is_missing(
    case: tuple[ScalingLimits, list[Signals]], router_is_silent: bool
) -> None:
    limits, told = case
    last = told[-1]
    if router_is_silent:
        last = dataclasses.replace(last, backlog=None)
    else:
        assume(last.running)
        last = dataclasses.replace(last, loads=last.loads[: last.running - 1])
    decision, _ = decide(limits, [*told[:-1], last])
    assert decision.replicas >= last.target


@given(situations())
def test_steps_are_bounded(case: tuple[ScalingLimits, list[Signals]]) -> None:
    limits, told = case
    last = told[-1]
    decision, _ = decide(limits, told)
    most = max(last.running * limits.up_factor, last.running + limits.up_step)
    assert decision.replicas <= max(last.target, most)
    assert decision.replicas >= last.target - max(1, int(last.target * limits.down_share))


@given(situations(), loads, st.floats(0, 1))
def test_starved_time_never_makes_the_fleet_smaller(
    case: tuple[ScalingLimits, list[Signals]], load: Load, share: float
) -> None:
    """Time that was spare turns into starved time: no fewer replicas are wanted."""
    limits, told = case
    last = dataclasses.replace(told[-1], loads=(load,), running=1, target=max(told[-1].target, 1))
    moved = share * load.spare
    starved = dataclasses.replace(
        load, spare=load.spare - moved, starved=min(load.starved + moved, 1.0)
    )
    before, _ = decide(limits, [*told[:-1], last])
    after, _ = decide(limits, [*told[:-1], dataclasses.replace(last, loads=(starved,))])
    assert after.replicas >= before.replicas


@given(situations(), st.floats(0, 1e4))
def test_more_backlog_never_makes_the_fleet_smaller(
    case: tuple[ScalingLimits, list[Signals]], more: float
) -> None:
    limits, told = case
    last = told[-1]
    assume(last.backlog is not None)
    backlog = dataclasses.replace(last.backlog, seconds=(*last.backlog.seconds, more))
    before, _ = decide(limits, told)
    after, _ = decide(limits, [*told[:-1], dataclasses.replace(last, backlog=backlog)])
    assert after.replicas >= before.replicas


@given(st.integers(1, 10), st.floats(0, 1))
def test_a_steady_load_settles(count: int, load: float) -> None:
    """The same work on more replicas is less on each; it comes to rest and stays."""

    def signals(now: float, target: int) -> Signals:
        return steady(target, min(load * count / target, 1.0), now=now)

    course = follow(signals, dataclasses.replace(LIMITS, hold_s=60), start=count, seconds=900)
    assert len(set(course[-200:])) == 1


def test_while_replicas_start_the_growth_factor_does_not_compound() -> None:
    """C55: nothing is up yet, and nothing is asked for."""
    limits = ScalingLimits(min_replicas=2, max_replicas=10, up_factor=2)
    state, course = ScalingState(), []
    for second in range(4):
        signals = Signals(now=float(second), target=2, running=0, backlog=QUIET)
        decision = desired_replicas(signals, limits, state)
        state = decision.state
        course.append(decision.replicas)
    assert course == [2, 2, 2, 2]


def test_nor_with_a_long_backlog() -> None:
    backlog = Backlog(seconds=(1e6,), waiting=1000)
    limits = ScalingLimits(max_replicas=1000, up_factor=2)
    signals = Signals(now=0, target=50, running=20, loads=(at(1.0),) * 20, backlog=backlog)
    state = desired_replicas(signals, limits, ScalingState()).state
    assert desired_replicas(signals, limits, state).replicas == 50


def test_a_request_wakes_and_an_idle_fleet_sleeps() -> None:
    """R47, R44."""
    limits = ScalingLimits(min_replicas=0, max_replicas=4, zero_hold_s=30, hold_s=10)

    def signals(now: float, target: int) -> Signals:
        busy = 100 <= now < 110
        waiting = Backlog(seconds=(0.1,), waiting=1) if busy and not target else QUIET
        return steady(target, 0.3 if busy else 0.0, now=now, backlog=waiting)

    course = follow(signals, limits, start=1, seconds=300)
    assert course[50:100] == [0] * 50
    assert course[100:130] == [1] * 30
    assert course[-100:] == [0] * 100


def test_spare_time_means_that_there_is_room_however_full_the_batch_was() -> None:
    assert Load(busy=0.3, spare=0.7, work=0.3, rows=1.0, kv=0.9).level == pytest.approx(0.3)


def test_thin_batches_are_room_though_the_device_is_always_busy() -> None:
    assert Load(busy=1.0, work=0.1, rows=0.05, kv=0.2).level == pytest.approx(0.2)


def test_late_answers_without_spare_time_are_a_reason_to_grow() -> None:
    def signals(now: float, target: int) -> Signals:
        load = Load(busy=1.0, work=0.3)
        backlog = Backlog(seconds=(0.0,), missed=now, ended=now * 2)
        return steady(target, 0, now=now, loads=(load,) * target, backlog=backlog)

    assert follow(signals, start=2, seconds=100)[-1] > 2

    def spared(now: float, target: int) -> Signals:
        return dataclasses.replace(signals(now, target), loads=(at(0.3),) * target)

    assert max(follow(spared, start=2, seconds=100)) == 2


def test_a_router_that_restarts_is_no_wave_of_misses() -> None:
    def signals(now: float, target: int) -> Signals:
        since = now if now < 50 else now - 50
        backlog = Backlog(seconds=(0.0,), missed=0, ended=since)
        return steady(
            target, 0, now=now, loads=(Load(busy=1.0, work=0.5),) * target, backlog=backlog
        )

    assert max(follow(signals, start=2, seconds=100)) == 2


def test_after_a_flap_it_waits_longer() -> None:
    """A load that comes back each time the fleet has shrunk."""
    limits = dataclasses.replace(LIMITS, hold_s=30)

    def signals(now: float, target: int) -> Signals:
        work = 4.0 if now % 120 < 30 else 1.0
        return steady(target, min(work / target, 1.0), now=now)

    course = follow(signals, limits, start=1, seconds=3000)
    falls = [second for second in range(1, 3000) if course[second] < course[second - 1]]
    assert any(second < 300 for second in falls)
    assert not any(second > 900 for second in falls)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spare": 0.9, "margin": 0.2}, "spare"),
        ({"hold_s": -1}, "seconds"),
        ({"holds": 1}, "holds is not a limit"),
        ({"max_replicas": 3}, "max_replicas is not a limit"),
        ({"spare": "much"}, "spare must be a number"),
        ({"up_factor": 0.5}, "up_factor"),
        ({"max_missed": 2}, "max_missed"),
        ({"hold_s": 10_000}, "max_hold_s"),
    ],
)
def test_limits_that_cannot_work_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_limits(settings)


def test_bounds_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="min_replicas"):
        ScalingLimits(min_replicas=3, max_replicas=2)

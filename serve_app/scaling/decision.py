"""How many replicas there should be: a pure function of signals, limits and its own last state.

    level    of one replica: the share of it that is taken, whether of its time, rows or KV blocks.
             Starved time counts as taken: the work for it waits at the router.
    demand   levels of all replicas, and how fast the router's backlog grows: replicas' worth of
             work that arrives
    needed   demand, its trend until a new replica is up, and a backlog that would outlast the
             promised wait, at most 1 - spare of each replica
    kept     the greatest need of the last `hold_s` seconds, with a margin: the fleet shrinks to it

docs/scaling.md explains it with numbers. The module knows neither Ray nor where signals come from.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, expm1, inf

from serve_app.scaling.types import Decision, Numbers, ScalingLimits, ScalingState, Signals

FAST_S, SLOW_S = 10.0, 90.0
"""Over how long the two means of demand reach back; their difference is the trend."""
MAX_TREND = 0.5
"""Anticipated growth is at most this share of the demand."""
FLAP_S = 900.0
"""Growing again so soon after shrinking shows that it was wrong to shrink."""
HOLD_GROWTH = 4
"""What a flap multiplies the hold by."""
CALM_S = 3600.0
"""In which a hold that flaps have lengthened falls by half."""
IDLE = 0.01
"""Replicas' worth of demand that is none."""


def desired_replicas(signals: Signals, limits: ScalingLimits, state: ScalingState) -> Decision:
    """Never outside the limits; never fewer than `signals.target` while a signal is missing."""
    first = state.at == -inf
    state = _observe(signals, limits, state)
    expected = state.fast + min(_trend(state) * limits.start_s, MAX_TREND * state.fast)
    needed, cause = _needed(signals, limits, state, expected)
    state = _remember(signals, limits, state, max(needed, signals.target if first else 0))
    kept = state.kept[0][1] if needed or signals.target > 1 else 0
    replicas, reason = signals.target, f"steady: {cause}"
    if needed > signals.target:
        replicas, reason = _grow(signals, limits, needed, cause)
    elif max(needed, kept) < signals.target:
        replicas, reason = _shrink(signals, limits, state, max(needed, kept))
    bounded = min(max(replicas, limits.min_replicas), limits.max_replicas)
    if bounded != replicas:
        reason = f"{reason}; held within {limits.min_replicas} to {limits.max_replicas}"
    numbers = _numbers(signals, state, expected, needed, kept)
    return Decision(
        replicas=bounded,
        reason=reason,
        numbers=numbers,
        state=_note(signals, limits, bounded, state),
    )


def _is_complete(signals: Signals) -> bool:
    return signals.backlog is not None and len(signals.loads) >= signals.running


def _occupied(signals: Signals, state: ScalingState) -> float:
    """Levels of all replicas; those that are silent are taken for like the rest."""
    if signals.loads:
        levels = sum(load.level for load in signals.loads)
        return levels * max(signals.running / len(signals.loads), 1.0)
    return state.fast if signals.running else 0.0


def _backlog_s(signals: Signals, state: ScalingState) -> float:
    return sum(signals.backlog.seconds) if signals.backlog is not None else state.backlog_s


def _observe(signals: Signals, limits: ScalingLimits, state: ScalingState) -> ScalingState:
    """Take the new signals into the means."""
    first = state.at == -inf
    elapsed = 0.0 if first else max(signals.now - state.at, 0.0)
    backlog_s = _backlog_s(signals, state)
    growth = _mean_rate(state.growth, backlog_s - state.backlog_s, elapsed, FAST_S)
    occupied = _occupied(signals, state)
    # What is taken is known at once; only the backlog's growth is noisy.
    demand = max(occupied + growth, 0.0)
    hold_s = limits.hold_s + max(state.hold_s - limits.hold_s, 0.0) * 0.5 ** (elapsed / CALM_S)
    state = _observe_misses(signals, state, elapsed)
    is_active = _is_active(signals) or first or not _is_complete(signals)
    return replace(
        state,
        at=signals.now,
        fast=demand if first else _mean(state.fast, demand, elapsed, FAST_S),
        slow=demand if first else _mean(state.slow, demand, elapsed, SLOW_S),
        growth=growth,
        backlog_s=backlog_s,
        hold_s=hold_s,
        active_at=signals.now if is_active else state.active_at,
    )


def _observe_misses(signals: Signals, state: ScalingState, elapsed: float) -> ScalingState:
    """A router that restarts counts from zero."""
    if signals.backlog is None:
        return state
    missed, ended = signals.backlog.missed, signals.backlog.ended
    more, of = missed - state.missed, ended - state.ended
    share = state.miss_share
    if of > 0 and more >= 0 and state.ended > 0:
        share = _mean(share, min(more / of, 1.0), elapsed, FAST_S)
    else:
        share = _mean(share, 0.0, elapsed, SLOW_S)
    return replace(state, missed=missed, ended=ended, miss_share=share)


def _mean(old: float, new: float, elapsed: float, reach: float) -> float:
    return old + (new - old) * -expm1(-elapsed / reach)


def _mean_rate(old: float, change: float, elapsed: float, reach: float) -> float:
    """The mean of `change / elapsed`, finite however short the time: the weight falls with it."""
    if elapsed <= 0:
        return old
    weight = -expm1(-elapsed / reach)
    return old * (1 - weight) + change * (weight / elapsed)


def _trend(state: ScalingState) -> float:
    """Replicas' worth of growth a second; a fall is not anticipated."""
    return max((state.fast - state.slow) / (SLOW_S - FAST_S), 0.0)


def _is_active(signals: Signals) -> bool:
    waiting = signals.backlog.waiting if signals.backlog is not None else 0
    return waiting > 0 or any(max(load.level, load.rows) > IDLE for load in signals.loads)


def _needed(
    signals: Signals, limits: ScalingLimits, state: ScalingState, expected: float
) -> tuple[int, str]:
    """Replicas that should be there as soon as possible, and why."""
    share = 1 - limits.spare
    needed = ceil(expected / share - IDLE)
    cause = f"{expected:.2f} replicas' worth expected, at most {share:.0%} of each"
    wait_s = _wait_s(signals, state)
    if wait_s > limits.wait_s:
        # Work it off in the time that a new replica takes to come, once it is there.
        more = state.backlog_s / max(limits.start_s, 4 * limits.wait_s, FAST_S)
        queued = ceil((expected + more) / share - IDLE)
        if queued > needed:
            needed = queued
            cause = f"{cause}; {state.backlog_s:.1f} s of work wait, promised are {limits.wait_s} s"
    missing = _missing_slo(signals, limits, state)
    if missing > needed:
        needed = missing
        cause = f"{state.miss_share:.1%} of answers broke their SLO and little time is spare"
    if not needed and _wants_one(signals, limits, state):
        needed, cause = 1, "a request waits, or one came lately"
    return needed, cause


def _wait_s(signals: Signals, state: ScalingState) -> float:
    """With nobody there, any wait is too long."""
    if state.backlog_s <= 0:
        return 0.0
    return state.backlog_s / signals.running if signals.running else inf


def _missing_slo(signals: Signals, limits: ScalingLimits, state: ScalingState) -> int:
    """One step more, if answers are late for want of time and nothing is on its way yet."""
    if state.miss_share <= limits.max_missed or not signals.loads:
        return 0
    spare = sum(load.spare for load in signals.loads) / len(signals.loads)
    settled = signals.now - state.up_at > limits.start_s and signals.running >= signals.target
    if spare >= limits.spare or not settled:
        return 0
    return signals.target + max(1, int(signals.target * limits.down_share))


def _wants_one(signals: Signals, limits: ScalingLimits, state: ScalingState) -> bool:
    if signals.backlog is not None and signals.backlog.waiting:
        return True
    return signals.target > 0 and signals.now - state.active_at < limits.zero_hold_s


def _remember(
    signals: Signals, limits: ScalingLimits, state: ScalingState, needed: int
) -> ScalingState:
    """Keep the greatest needs of the hold; each is forgotten when a later one is as great."""
    share = 1 - limits.spare - limits.margin
    need = max(ceil(state.fast / share - IDLE), needed)
    if not _is_complete(signals):
        need = max(need, signals.target)
    kept = [(at, old) for at, old in state.kept if old > need and at >= signals.now - state.hold_s]
    return replace(state, kept=(*kept, (signals.now, need)))


def _grow(signals: Signals, limits: ScalingLimits, needed: int, cause: str) -> tuple[int, str]:
    """What is still starting is no ground to go further."""
    most = max(int(signals.running * limits.up_factor), signals.running + limits.up_step)
    replicas = max(min(needed, most), signals.target)
    if replicas == signals.target:
        return replicas, f"steady: {needed} needed, but no more than {most} at once; {cause}"
    return replicas, f"up from {signals.target} to {replicas}: {cause}"


def _shrink(
    signals: Signals, limits: ScalingLimits, state: ScalingState, enough: int
) -> tuple[int, str]:
    if not _is_complete(signals):
        return signals.target, "steady: metrics are missing"
    if signals.now - state.down_at < limits.down_period_s:
        return signals.target, f"steady: the last step down to {signals.target} was just now"
    step = max(1, int(signals.target * limits.down_share))
    replicas = max(enough, signals.target - step)
    if not replicas:
        return 0, f"down from {signals.target} to 0: nothing to do for {limits.zero_hold_s:.0f} s"
    room = 1 - limits.spare - limits.margin
    return replicas, (
        f"down from {signals.target} to {replicas}: {enough} have been enough for"
        f" {state.hold_s:.0f} s; {state.fast:.2f} replicas' worth now, at most {room:.0%} of each"
    )


def _note(
    signals: Signals, limits: ScalingLimits, replicas: int, state: ScalingState
) -> ScalingState:
    """Remember what was done; a hold that was too short becomes longer."""
    if replicas < signals.target:
        return replace(state, down_at=signals.now)
    if replicas == signals.target:
        return state
    flapped = signals.target > 0 and signals.now - state.down_at < FLAP_S
    hold_s = min(state.hold_s * HOLD_GROWTH, limits.max_hold_s) if flapped else state.hold_s
    return replace(state, up_at=signals.now, down_at=-inf, hold_s=hold_s)


def _numbers(
    signals: Signals, state: ScalingState, expected: float, needed: int, kept: int
) -> Numbers:
    means = {
        name: sum(getattr(load, name) for load in signals.loads) / max(len(signals.loads), 1)
        for name in ("busy", "bubble", "starved", "spare", "kv", "rows")
    }
    return Numbers(
        target=signals.target,
        running=signals.running,
        reported=len(signals.loads),
        demand=state.fast,
        expected=expected,
        needed=needed,
        kept=kept,
        backlog_s=state.backlog_s,
        wait_s=min(_wait_s(signals, state), 1e9),
        waiting=signals.backlog.waiting if signals.backlog is not None else 0,
        missed=state.miss_share,
        hold_s=state.hold_s,
        **means,
    )

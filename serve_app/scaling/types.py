"""What a scaling decision is made of: signals, limits, the state between two, and the decision.

Values only; `autoscaling` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One replica over the last seconds; shares of its time, rows and blocks, 0 to 1."""

    busy: float = 0.0
    bubble: float = 0.0
    starved: float = 0.0
    spare: float = 0.0
    work: float = 0.0
    """Busy time, less what is the same for one row as for all and so is free for more rows."""
    rows: float = 0.0
    kv: float = 0.0

    @property
    def level(self) -> float:
        """Taken is what has neither time nor room left."""
        return max(min(1 - self.spare, max(self.work, self.rows, self.kv) + self.starved, 1.0), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What waits at the router."""

    seconds: tuple[float, ...] = ()
    """Seconds of one replica's work, by band; only what would run if there were room."""
    waiting: int = 0
    """Requests; those held back by their own tenant's limits do not count."""
    missed: float = 0.0
    """Answers that broke a tenant's SLO, since the router started ..."""
    ended: float = 0.0
    """... of so many that succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    now: float
    """Seconds of any clock that does not go back."""
    target: int
    """Replicas that there should be by now."""
    running: int
    """Replicas that are up."""
    loads: tuple[Load, ...] = ()
    """The loads of replicas that have reported lately."""
    backlog: Backlog | None = None
    """None: the router is silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """What may be tuned. Raises ValueError on what cannot work."""

    min_replicas: int = 1
    max_replicas: int = 1
    spare: float = 0.2
    """Share of each replica's capacity that is kept for sudden load."""
    margin: float = 0.15
    """Share kept beyond `spare` after a replica has gone."""
    wait_s: float = 1.0
    """Longest time that clients should wait for a replica."""
    start_s: float = 60.0
    """Time until a new replica works."""
    hold_s: float = 300.0
    """So long a smaller fleet must have been enough before it shrinks."""
    max_hold_s: float = 1800.0
    """The same, once shrinking has turned out wrong several times."""
    zero_hold_s: float = 300.0
    """So long nothing must have happened before the last replica goes."""
    max_missed: float = 0.01
    """Share of answers that may break their SLO before the fleet grows."""
    up_factor: float = 3.0
    """The fleet grows to at most this multiple of what is up at once ..."""
    up_step: int = 4
    """... or by so many."""
    down_share: float = 0.1
    """Share of the fleet that goes at once; one replica at least."""
    down_period_s: float = 15.0
    """Time between two steps down."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError("scaling needs 0 <= min_replicas <= max_replicas, max_replicas >= 1")
        if min(self.spare, self.margin) < 0 or self.spare + self.margin >= 1:
            raise ValueError("scaling needs spare >= 0, margin >= 0, spare + margin < 1")
        if min(self.wait_s, self.start_s, self.hold_s, self.zero_hold_s, self.down_period_s) < 0:
            raise ValueError("scaling needs times of 0 or more seconds")
        if self.max_hold_s < self.hold_s:
            raise ValueError("scaling needs max_hold_s >= hold_s")
        if self.up_factor < 1 or self.up_step < 1 or not 0 < self.down_share <= 1:
            raise ValueError("scaling needs up_factor >= 1, up_step >= 1, 0 < down_share <= 1")
        if not 0 <= self.max_missed <= 1:
            raise ValueError("scaling needs max_missed from 0 to 1")


def read_limits(settings: Mapping[str, Any]) -> ScalingLimits:
    """As a configuration file has them, without the bounds. Raises ValueError."""
    known = {one.name for one in fields(ScalingLimits)} - {"min_replicas", "max_replicas"}
    for name, value in settings.items():
        if name not in known:
            raise ValueError(
                f"{name} is not a limit of scaling; there are {', '.join(sorted(known))}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number")
    return ScalingLimits(**settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    """What one decision remembers for the next."""

    at: float = -inf
    fast: float = 0.0
    slow: float = 0.0
    growth: float = 0.0
    """Growth of the backlog, in replicas' worth of work."""
    backlog_s: float = 0.0
    missed: float = 0.0
    ended: float = 0.0
    miss_share: float = 0.0
    kept: tuple[tuple[float, int], ...] = ()
    """Times and needs, falling: the first is the greatest of the hold."""
    hold_s: float = 0.0
    active_at: float = -inf
    down_at: float = -inf
    up_at: float = -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a decision rests on, for logs and dashboards."""

    target: int
    running: int
    reported: int
    demand: float
    expected: float
    """Demand when a replica that starts now is up."""
    needed: int
    kept: int
    """Greatest need of the hold, with the margin."""
    backlog_s: float
    wait_s: float
    """Until what waits now has a place, with the replicas that are up."""
    waiting: int
    missed: float
    """Share of late answers that broke their SLO."""
    busy: float
    bubble: float
    starved: float
    spare: float
    kv: float
    rows: float
    hold_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    replicas: int
    reason: str
    numbers: Numbers
    state: ScalingState
    is_surprised: bool = False
    """The target was not what the last decision had made it."""

    def explain(self) -> dict[str, object]:
        """For JSON."""
        return {"replicas": self.replicas, "reason": self.reason} | asdict(self.numbers)

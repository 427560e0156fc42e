"""The policies that are compared: ours, and counting requests as Ray Serve does by default.

Each is told once a second what could be observed, and says how many replicas there should be.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

import numpy as np

from benchmarks.scale_fleet import ROWS, Array, Counts, Observed
from serve_app.scaling.decision import desired_replicas
from serve_app.scaling.types import Backlog, Load, ScalingLimits, ScalingState, Signals

WINDOW = 5
"""Seconds that our replicas' signals are means of."""


class Policy(Protocol):
    def decide(
        self, now: float, ready: int, target: int, seen: Observed | None, counts: Counts
    ) -> int:
        """`seen` is None while metrics are lost."""


@dataclass(slots=True)
class Ours:
    """`desired_replicas` with signals as replicas would report them: a little apart."""

    limits: ScalingLimits
    seed: int
    state: ScalingState = field(default_factory=ScalingState)
    reasons: list[str] = field(default_factory=list)
    _recent: deque[Observed] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _spread: Array = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self._spread = rng.normal(1.0, 0.05, self.limits.max_replicas)

    def decide(
        self, now: float, ready: int, target: int, seen: Observed | None, counts: Counts
    ) -> int:
        if seen is not None:
            self._recent.append(seen)
        backlog = None
        if seen is not None:
            backlog = Backlog(
                seconds=(seen.backlog_s,),
                waiting=ceil(seen.waiting),
                missed=counts.missed,
                ended=counts.missed + counts.good,
            )
        signals = Signals(
            now=now,
            target=target,
            running=ready,
            loads=self._loads(ready) if seen is not None else (),
            backlog=backlog,
        )
        decision = desired_replicas(signals, self.limits, self.state)
        self.state = decision.state
        if decision.replicas != target:
            self.reasons.append(f"{now:.0f} s: {decision.reason}")
        return decision.replicas

    def _loads(self, ready: int) -> tuple[Load, ...]:
        busy, work, rows, kv = np.mean([each[:4] for each in self._recent], axis=0)
        return tuple(
            Load(
                busy=min(busy * factor, 1.0),
                spare=max(1 - busy * factor, 0.0),
                work=min(work * factor, 1.0),
                rows=min(rows * factor, 1.0),
                kv=min(kv * factor, 1.0),
            )
            for factor in self._spread[:ready].tolist()
        )


@dataclass(slots=True)
class RequestCount:
    """Ray Serve's default: as many replicas as keep `target_ongoing_requests` on each, by the mean
    over the look-back, once that was wanted throughout a delay. All delays are its defaults;
    the target is the batch at which a replica is full. A handle that does not report counts as one
    without requests."""

    min_replicas: int
    max_replicas: int
    target_ongoing_requests: float = float(ROWS)
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_s: int = 30
    metrics_interval_s: int = 10
    reasons: list[str] = field(default_factory=list)
    _samples: deque[float] = field(init=False)
    _pushed: float = 0.0
    _wanted_since: float | None = None
    _direction: int = 0

    def __post_init__(self) -> None:
        self._samples = deque(maxlen=self.look_back_s)

    def decide(
        self, now: float, ready: int, target: int, seen: Observed | None, counts: Counts
    ) -> int:
        self._samples.append(seen.ongoing if seen is not None else 0.0)
        if int(now) % self.metrics_interval_s == 0:
            self._pushed = sum(self._samples) / len(self._samples)
        if not ready:
            return max(target, int(self._pushed > 0))
        wanted = ceil(self._pushed / self.target_ongoing_requests)
        wanted = min(max(wanted, self.min_replicas), self.max_replicas)
        direction = (wanted > target) - (wanted < target)
        if direction != self._direction or self._wanted_since is None:
            self._direction, self._wanted_since = direction, now
        delay = self.upscale_delay_s if direction > 0 else self.downscale_delay_s
        if direction and now - self._wanted_since >= delay:
            self._wanted_since = None
            return wanted
        return target

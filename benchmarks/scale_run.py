"""Runs one policy through one scenario, and counts what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale_fleet import Fleet, Observed
from benchmarks.scale_policies import Policy
from benchmarks.scale_scenarios import Scenario

FLAP_S = 900.0
"""A fleet that shrinks and grows again within this time has flapped."""


@dataclass(slots=True)
class Course:
    """What happened, second by second, and in sum."""

    seconds: int
    good: float = 0.0
    missed: float = 0.0
    replica_hours: float = 0.0
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    """Second, replicas before, replicas after."""
    target: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    misses: list[float] = field(default_factory=list)
    """Until each second."""

    @property
    def miss_share(self) -> float:
        return self.missed / max(self.missed + self.good, 1.0)

    @property
    def flaps_per_h(self) -> float:
        flaps, down_at = 0, -np.inf
        for second, before, after in self.changes:
            if after < before:
                down_at = second
            elif second - down_at < FLAP_S:
                flaps += 1
                down_at = -np.inf
        return flaps / (self.seconds / 3600)


def run(scenario: Scenario, policy: Policy, seed: int) -> Course:
    """Deterministic by seed; two policies see the same arrivals."""
    arrivals: NDArray[np.int64] = np.random.default_rng(seed).poisson(scenario.rates)
    fleet = Fleet(scenario.tenants, scenario.start_s, scenario.initial, scenario.initial)
    course = Course(len(arrivals))
    for second, arrived in enumerate(arrivals):
        if second in scenario.deaths:
            fleet.kill(scenario.deaths[second])
        seen: Observed | None = fleet.step(arrived, second)
        if any(start <= second < end for start, end in scenario.lost):
            seen = None
        target = policy.decide(second, fleet.ready, fleet.target, seen, fleet.counts)
        if target != fleet.target:
            course.changes.append((second, fleet.target, target))
            fleet.scale(target, second)
        course.target.append(target)
        course.ready.append(fleet.ready)
        course.misses.append(fleet.counts.missed)
    counts = fleet.counts
    course.good, course.missed = counts.good, counts.missed
    course.replica_hours = counts.replica_s / 3600
    return course

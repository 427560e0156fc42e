"""The short form of `python -m benchmarks.autoscale`: one seed of what matters, for an hour."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from types import SimpleNamespace

import numpy as np
import pytest
from ray.serve.autoscaling_policy import _core_replica_queue_length_policy

from benchmarks.autoscale import compare, is_better
from benchmarks.scale_fleet import Counts, Fleet, Observed, Tenant
from benchmarks.scale_policies import RequestCount
from benchmarks.scale_scenarios import Scenario, scenarios


def shortened(name: str, seconds: int) -> Scenario:
    scenario = scenarios(seed=1)[name]
    return replace(scenario, rates=scenario.rates[:seconds])


@pytest.mark.parametrize(("name", "seconds"), [("bursts", 2400), ("noisy", 2400)])
def test_fewer_misses_with_fewer_replicas_than_counting_requests(name: str, seconds: int) -> None:
    courses = compare(shortened(name, seconds), seed=1)
    assert is_better(courses["ours"], courses["ray"])
    assert name == "bursts" or courses["ours"].flaps_per_h <= 2


def test_while_metrics_are_lost_nothing_shrinks() -> None:
    scenario = shortened("lost_metrics", 3600)
    ours = compare(scenario, seed=1)["ours"]
    for start, end in scenario.lost[:2]:
        assert all(after >= before for at, before, after in ours.changes if start <= at < end)
    assert ours.miss_share < 0.01


def test_it_is_deterministic() -> None:
    scenario = shortened("ramps", 300)
    assert compare(scenario, seed=2) == compare(scenario, seed=2)


@pytest.mark.parametrize("ongoing", [0.0, 1.0, 127.0, 129.0, 700.0])
def test_requests_are_counted_as_ray_serve_counts_them(ongoing: float) -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 128.0)
    context = SimpleNamespace(
        current_num_replicas=3, target_num_replicas=3, config=config, total_num_requests=ongoing
    )
    theirs = ceil(_core_replica_queue_length_policy(context)[0])
    policy = RequestCount(0, 100, upscale_delay_s=0, downscale_delay_s=0)
    seen = Observed(0, 0, 0, 0, 0, 0, ongoing)
    assert policy.decide(0.0, 3, 3, seen, Counts()) == theirs


def test_every_request_ends_once_whatever_dies() -> None:
    fleet = Fleet((Tenant(500, 100), Tenant(4000, 300)), start_s=10, ready=3, target=3)
    rng = np.random.default_rng(1)
    arrived = 0
    for second in range(300):
        arrivals = rng.poisson([8.0, 1.0]) if second < 200 else np.zeros(2, dtype=np.int64)
        arrived += int(arrivals.sum())
        if second in (50, 120):
            fleet.kill(2)
        fleet.step(arrivals, second)
    assert fleet.counts.good + fleet.counts.missed == pytest.approx(arrived)

"""The short form of `python -m benchmarks.fairness --parts simulated`: one run of what matters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from benchmarks.fair_simulation import (
    by_ingress,
    longest_prefix,
    ours,
    policies,
    run,
    share_error,
    victim_ratio,
)
from benchmarks.sim_engine import EngineModel, Job, Simulation
from benchmarks.sim_policies import Fcfs
from benchmarks.sim_scenarios import Scenario, scenarios
from benchmarks.sim_trace import Trace


def shortened(name: str, seconds: float) -> Scenario:
    return replace(scenarios(seed=1)[name], seconds=seconds)


def test_weights_are_served_to_within_a_percent() -> None:
    scenario = shortened("weights", 600)
    assert share_error(run(scenario, partial(ours, scenario))) < 0.01


def test_two_ingresses_share_one_order() -> None:
    scenario = shortened("two_ingresses", 400)
    assert share_error(run(scenario, partial(by_ingress, scenario))) < 0.02


def test_a_flood_hardly_delays_a_small_tenant_and_first_come_first_served_does() -> None:
    scenario = shortened("overload", 300)
    waits = {name: run(scenario, make) for name, make in policies(scenario).items()}
    worst = {name: trace.differences().max() for name, trace in waits.items()}
    assert worst["ours"] < 3000 < 30_000 < worst["fcfs"]
    assert waits["ours"].tokens_per_s() > 0.99 * waits["fcfs"].tokens_per_s()


def test_locality_costs_little_fairness_and_gains_most_of_the_throughput() -> None:
    scenario = shortened("shared_prefixes", 300)
    own, best = run(scenario, partial(ours, scenario)), longest_prefix(scenario)
    assert own.tokens_per_s() > 0.85 * best.tokens_per_s()
    assert own.differences().max() < 5000 < best.differences().max()


@pytest.mark.parametrize(("rows", "reserve", "most"), [(8, 1, 30), (8, 0, 60)])
def test_a_kept_row_shortens_the_wait_of_a_newcomer(rows: int, reserve: int, most: float) -> None:
    assert 1 < victim_ratio(1, rows, reserve) < most


def test_the_engine_counts_tokens_and_time() -> None:
    """Two rows: a prompt of 100 in chunks of 60, then 3 tokens, one per step of 1 s."""
    model = EngineModel(rows=2, base_s=1.0, per_row_s=0.0, per_prompt_token_s=0.01, chunk=60)
    trace = Trace(Fcfs(rows=2), {"a": 1.0})
    jobs = [Job(str(number), "a", 0.0, 100, 3) for number in range(3)]
    simulation = Simulation(model, trace, jobs, on_step=trace.observe)
    simulation.run(1000.0)
    assert (trace.requests, trace.tokens) == (3, 309)
    first, second, third = sorted(trace.ttft["a"])
    assert first == pytest.approx(2 * 1 + 0.01 * 60 + 0.01 * 60)
    assert second > first
    assert third > second
    assert trace.service()["a"][-1] <= 3 * (100 + 2 * 3)
    assert [job.produced for job in jobs] == [3, 3, 3]

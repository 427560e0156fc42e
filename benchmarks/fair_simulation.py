"""The fairness simulation: each scenario under each policy, and the figures of them.

Requests differ from run to run by their seed and are the same for all policies of a run. All
policies have the same rows, so ours keeps none for newcomers but where that is the subject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.report import Report
from benchmarks.sim_engine import Policy, Simulation
from benchmarks.sim_policies import (
    Fcfs,
    LongestPrefix,
    Ours,
    OursByIngress,
    RequestRate,
    ShortestCounter,
    Vtc,
)
from benchmarks.sim_scenarios import Client, Scenario, constant, scenarios
from benchmarks.sim_trace import Trace
from router.policy import FairPolicy

OURS = FairPolicy(burst=0.0, reserve_rows=0)
"""Nobody banks anything, as in VTC, and no row is kept."""
ARENA_RUNS = 27
"""A maximum scatters: more runs, which cost little."""
SETTLED_S = 100
MakePolicy = Callable[[], Policy]


def run(scenario: Scenario, make: MakePolicy) -> Trace:
    trace = Trace(make(), scenario.weights)
    simulation = Simulation(
        scenario.model, trace, scenario.arrivals(), scenario.again(), trace.observe
    )
    simulation.run(scenario.seconds)
    return trace


def policies(scenario: Scenario) -> dict[str, MakePolicy]:
    """By name, as figures and pictures call them."""
    weights, rows = scenario.weights, scenario.model.rows
    return {
        "fcfs": lambda: Fcfs(rows),
        "request_rate": lambda: RequestRate(rows, scenario.requests_per_minute),
        "shortest_counter": lambda: ShortestCounter(weights, rows),
        "vtc": lambda: Vtc(weights, rows),
        "ours": partial(ours, scenario),
    }


def ours(scenario: Scenario, policy: FairPolicy = OURS) -> Policy:
    return Ours(scenario.weights, scenario.model.rows, policy, scenario.model.kv_tokens)


def by_ingress(scenario: Scenario) -> Policy:
    return OursByIngress(scenario.weights, scenario.model.rows, OURS, ingresses=2)


def longest_prefix(scenario: Scenario) -> Trace:
    """The simulation tells this policy what its cache holds."""
    policy = LongestPrefix(scenario.model.rows, lambda job: simulation.is_cached(job))
    trace = Trace(policy, scenario.weights)
    simulation = Simulation(
        scenario.model, trace, scenario.arrivals(), scenario.again(), trace.observe
    )
    simulation.run(scenario.seconds)
    return trace


def share_error(trace: Trace) -> float:
    """The largest relative error of a tenant's share."""
    total = sum(trace.weights.values())
    shares = trace.share(SETTLED_S)
    return max(abs(share / trace.weights[name] * total - 1) for name, share in shares.items())


def p99(trace: Trace, tenant: str) -> float:
    return float(np.percentile(trace.ttft[tenant], 99))


def victim_ratio(seed: int, rows: int, reserve: int | None) -> float:
    """p99 of the time to the victim's first tokens, with a flood and alone."""
    scenario = scenarios(seed)["victim"]
    flood, victim = scenario.clients["flood"], scenario.clients["victim"]
    small = rows < 100
    clients = {
        "flood": replace(flood, outstanding=24) if small else flood,
        "victim": replace(victim, rate=constant(0.3)) if small else victim,
    }
    policy = FairPolicy(reserve_rows=reserve)
    model = replace(scenario.model, rows=rows)
    seconds = 2000.0 if small else scenario.seconds
    both, alone = (
        replace(scenario, clients=chosen, model=model, seconds=seconds)
        for chosen in (clients, _only(clients, "victim"))
    )
    times = [p99(run(each, partial(ours, each, policy)), "victim") for each in (both, alone)]
    return times[0] / times[1]


def _only(clients: dict[str, Client], name: str) -> dict[str, Client]:
    return {name: clients[name]}


def measure(report: Report, runs: int, plots: Path | None) -> None:
    """Add the figures, and draw the first run of each scenario."""
    seeds = range(runs)
    for name in scenarios():
        if name != "victim":
            _side_by_side(report, name, range(ARENA_RUNS) if name == "arena" else seeds, plots)
    shared = [run(each, partial(by_ingress, each)) for each in _each("two_ingresses", seeds)]
    report.add("share_error.two_ingresses", map(share_error, shared))
    for key, rows, reserve in (("256", 256, None), ("8_reserve", 8, 1), ("8", 8, 0)):
        ratios = [victim_ratio(seed, rows, reserve) for seed in seeds]
        report.add(f"victim_ttft_p99_ratio.{key}", ratios)
    _locality(report, seeds)


def _each(name: str, seeds: range) -> list[Scenario]:
    return [scenarios(seed)[name] for seed in seeds]


def _side_by_side(report: Report, name: str, seeds: range, plots: Path | None) -> None:
    traces: dict[str, list[Trace]] = {}
    for scenario in _each(name, seeds):
        for policy, make in policies(scenario).items():
            traces.setdefault(policy, []).append(run(scenario, make))
    for policy, of_policy in traces.items():
        worst = [float(trace.differences().max()) for trace in of_policy]
        report.add(f"{name}_max_diff.{policy}", worst)
    if name == "weights":
        report.add("share_error.weights", map(share_error, traces["ours"]))
    if name == "arena":
        pairs = zip(traces["ours"], traces["fcfs"], strict=True)
        shares = [ours.tokens_per_s() / fcfs.tokens_per_s() for ours, fcfs in pairs]
        report.add("arena_throughput_share", shares)
    tokens = median(trace.tokens for trace in traces["ours"])
    report.figures[f"{name}_tokens"] = tokens
    if plots is not None:
        from benchmarks.fair_plots import draw

        draw(plots, name, {policy: of_policy[0] for policy, of_policy in traces.items()})


def _locality(report: Report, seeds: range) -> None:
    each = _each("shared_prefixes", seeds)
    best = [longest_prefix(scenario) for scenario in each]
    own = [run(scenario, partial(ours, scenario)) for scenario in each]
    pairs = zip(own, best, strict=True)
    shares = [mine.tokens_per_s() / lpm.tokens_per_s() for mine, lpm in pairs]
    report.add("locality_throughput_share", shares)
    report.add(
        "shared_prefixes_max_diff.longest_prefix", [float(t.differences().max()) for t in best]
    )

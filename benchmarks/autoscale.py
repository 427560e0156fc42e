"""How many replicas follow a load, by our policy and by counting requests as Ray Serve does.

A simulation, deterministic by seed: the policy's own code on a model of a fleet of up to 1,000
H200s, beside Ray Serve's default formula with its default delays and look-back and a target of as
many ongoing requests as a full replica runs. `quarter` is the same with a quarter of that target,
about the best that trying found for this engine. Pictures need matplotlib: `pip install
'.[bench]'`.

A recorded trace is replayed with `--trace FILE`: CSV, a line per request: seconds, prompt tokens,
output tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.report import Report, parser
from benchmarks.scale_fleet import ROWS
from benchmarks.scale_policies import Ours, Policy, RequestCount
from benchmarks.scale_run import Course, run
from benchmarks.scale_scenarios import Scenario, recorded, scenarios
from serve_app.scaling.types import ScalingLimits

DOLLARS_PER_HOUR = 3.0
"""Of one replica, assumed."""
LESS = 0.85

Policies = dict[str, Callable[[Scenario, int], Policy]]


def _ours(scenario: Scenario, seed: int) -> Policy:
    limits = ScalingLimits(max_replicas=scenario.max_replicas, start_s=float(scenario.start_s))
    return Ours(limits, seed)


def _ray(scenario: Scenario, seed: int) -> Policy:
    return RequestCount(1, scenario.max_replicas)


def _quarter(scenario: Scenario, seed: int) -> Policy:
    return RequestCount(1, scenario.max_replicas, target_ongoing_requests=ROWS / 4)


POLICIES: Policies = {"ours": _ours, "ray": _ray, "quarter": _quarter}


def compare(scenario: Scenario, seed: int) -> dict[str, Course]:
    """What became of each policy, by its name."""
    return {name: run(scenario, make(scenario, seed), seed) for name, make in POLICIES.items()}


def is_better(ours: Course, theirs: Course) -> bool:
    """No more misses with 85% of the hours, or fewer misses with no more hours."""
    hours = ours.replica_hours / theirs.replica_hours
    if hours <= LESS:
        return ours.miss_share <= theirs.miss_share
    return hours <= 1 and ours.miss_share < theirs.miss_share


def _add(report: Report, name: str, runs: list[dict[str, Course]]) -> None:
    for policy in POLICIES:
        courses = [each[policy] for each in runs]
        report.add(f"slo_miss.{name}.{policy}", [one.miss_share for one in courses])
        report.add(f"replica_hours.{name}.{policy}", [one.replica_hours for one in courses])
        dollars = [one.replica_hours * DOLLARS_PER_HOUR / max(one.good, 1.0) for one in courses]
        report.add(f"dollars_per_good_response.{name}.{policy}", dollars)
        suffix = "" if policy == "ours" else f".{policy}"
        report.add(f"flaps_per_h.{name}{suffix}", [one.flaps_per_h for one in courses])
    better = [is_better(each["ours"], each["ray"]) for each in runs]
    report.add(f"better_than_ray.{name}", [float(each) for each in better])


def _by_seed(seed: int, trace: Path | None, replicas: float) -> dict[str, Scenario]:
    found = scenarios(seed)
    return found if trace is None else found | {"trace": recorded(trace, replicas)}


def main() -> None:
    options = parser("autoscale", __doc__)
    options.add_argument("--scenarios", nargs="+", choices=sorted(scenarios(0)), default=None)
    options.add_argument("--trace", type=Path, metavar="FILE", help="replay this, too")
    options.add_argument("--trace-replicas", type=float, default=20.0, help="its mean load")
    options.add_argument("--jobs", type=int, default=2, help="processes")
    options.add_argument("--plots", type=Path, metavar="FOLDER", help="write pictures here")
    chosen = options.parse_args()
    report = Report("autoscale")
    seeds = range(1, chosen.runs + 1)
    by_seed = {seed: _by_seed(seed, chosen.trace, chosen.trace_replicas) for seed in seeds}
    names = [
        name for name in by_seed[1] if name == "trace" or name in (chosen.scenarios or by_seed[1])
    ]
    with ProcessPoolExecutor(chosen.jobs) as pool:
        running = {
            name: [pool.submit(compare, by_seed[seed][name], seed) for seed in seeds]
            for name in names
        }
        for name, futures in running.items():
            runs = [future.result() for future in futures]
            _add(report, name, runs)
            if chosen.plots is not None:
                from benchmarks.scale_plots import draw

                draw(chosen.plots, name, by_seed[1][name], runs[0])
    report.write(chosen.json)


if __name__ == "__main__":
    main()

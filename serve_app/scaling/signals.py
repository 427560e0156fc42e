"""What a replica and Admission record for the autoscaler, and how it is read again.

Serve collects numbers by name from each process and keeps them for a while. The names are here, on
both sides, and nothing else is: what follows from the numbers is decided in `autoscaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, isfinite, nan

from replica.messages import Ready, Stats
from router.workload import Workload
from serve_app.scaling.types import Backlog, Load

TIME = ("busy", "bubble", "starved", "spare")
LOAD = (*TIME, "work", "rows", "kv")
MISSED, SUCCEEDED = "missed", "succeeded"
WAITING, SECONDS = "waiting.", "backlog_s."
"""Before the name of a deployment; behind the second one there is a band."""
ONLY_POOL = "Replica"
"""Of an application with one model: all that waits, waits for it."""


class LoadMeter:
    """Turns an engine's running sums into shares of the time between two calls."""

    def __init__(self, ready: Ready) -> None:
        self._ready = ready
        self._last = Stats()
        self._shares: dict[str, float] = {"spare": 1.0}
        self._least_step_s = float("inf")
        """What a step takes whatever it computes: the shortest mean that was seen."""

    def measure(self, stats: Stats) -> dict[str, float]:
        """By the names in `LOAD`. Between two reports of the engine shares stay as they were."""
        before, self._last = self._last, stats
        passed = stats.time.since(before.time)
        rows = min((stats.running + stats.waiting) / self._ready.max_rows, 1.0)
        if (total := passed.total) > 0:
            self._shares = {name: getattr(passed, name) / total for name in TIME}
            self._shares["work"] = self._work(passed.busy, stats.steps - before.steps, rows) / total
        kv = 1 - stats.free_blocks / self._ready.num_blocks
        return {name: self._shares.get(name, 0.0) for name in LOAD} | {"rows": rows, "kv": kv}

    def _work(self, busy: float, steps: int, rows: float) -> float:
        """Busy seconds, less the part of each step's fixed time that more rows could share."""
        if steps <= 0 or busy <= 0:
            return max(busy, 0.0)
        self._least_step_s = min(self._least_step_s, busy / steps)
        return max(busy - steps * self._least_step_s * (1 - rows), 0.0)


def load_of(recorded: Mapping[str, float]) -> Load | None:
    """None if anything is missing, or no number: who says that is as good as silent."""
    if not all(isfinite(recorded.get(name, nan)) for name in LOAD):
        return None
    return Load(**{name: float(recorded[name]) for name in LOAD})


def record_workload(
    workloads: Mapping[str, Workload], missed: int, succeeded: int
) -> dict[str, float]:
    """Of Admission. workloads: by deployment, as it is called where there are several models."""
    recorded = {MISSED: float(missed), SUCCEEDED: float(succeeded)}
    for pool, workload in workloads.items():
        recorded[f"{WAITING}{pool}"] = float(workload.waiting)
        for band, seconds in enumerate(workload.gpu_s):
            recorded[f"{SECONDS}{band}.{pool}"] = seconds
    return recorded


def backlog_of(recorded: Mapping[str, float], pool: str) -> Backlog | None:
    """What waits for the replicas of one deployment; None if Admission is silent. Nothing waits
    for a model that it has not heard of."""
    if MISSED not in recorded or SUCCEEDED not in recorded:
        return None
    if not all(map(isfinite, recorded.values())):
        return None
    only = pool == ONLY_POOL
    seconds = {
        name: value
        for name, value in recorded.items()
        if name.startswith(SECONDS) and (only or name.endswith(f".{pool}"))
    }
    waiting = sum(
        value
        for name, value in recorded.items()
        if name.startswith(WAITING) and (only or name == f"{WAITING}{pool}")
    )
    return Backlog(
        seconds=tuple(seconds[name] for name in sorted(seconds)),
        waiting=ceil(waiting),
        missed=recorded[MISSED],
        ended=recorded[SUCCEEDED],
    )

"""What the GPUs' time went into, and what an answer cost us.

Knows sums only: what tenants pay is in `router.pricing`, where time is measured is the replica's
business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from router.messages import GpuTime, Outcome
from router.store import HOUR_S, MICROS, Store, UsageRow, gpu_micros


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of all GPUs and all tenants' requests in a span of hours."""

    gpu_seconds: dict[str, float]
    """By what became of them; together the time that there was times the GPUs. "open" is what was
    computed for requests that had not ended, or after their ingress had let go of them; less
    what was open before and has ended since."""
    good_responses: int
    """Those that met their tenant's SLO; where it has none, those that succeeded."""
    dollars: float | None
    """All of those seconds at our own price; None if that is not known."""

    @property
    def dollars_per_good_response(self) -> float | None:
        if self.dollars is None or not self.good_responses:
            return None
        return self.dollars / self.good_responses


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Usage by hour, tenant and model, and the cost of all tenants together."""

    rows: list[UsageRow]
    cost: Cost
    dollars_per_hour: float | None
    """The price of one GPU."""


def gpu_seconds(row: UsageRow) -> float:
    """What was computed for one tenant's requests that have ended, however they did."""
    return sum(row.sums[gpu_micros(outcome)] for outcome in Outcome) / MICROS


def gpu_dollars(seconds: float, dollars_per_hour: float | None) -> float | None:
    return None if dollars_per_hour is None else seconds * dollars_per_hour / HOUR_S


def cost_of(rows: Iterable[UsageRow], gpu: GpuTime, dollars_per_hour: float | None) -> Cost:
    """Split the time of all GPUs by outcome. `rows` are those of all tenants."""
    rows = list(rows)
    ended = {
        outcome.value: sum(row.sums[gpu_micros(outcome)] for row in rows) / MICROS
        for outcome in Outcome
    }
    states = asdict(gpu)
    split = ended | {"open": states.pop("requests") - sum(ended.values())} | states
    dollars = gpu_dollars(sum(split.values()), dollars_per_hour)
    return Cost(split, sum(row.sums["slo_met"] for row in rows), dollars)


def usage_report(
    store: Store, start: float, end: float, tenant: str | None, dollars_per_hour: float | None
) -> UsageReport:
    """Hours that begin in [start, end); rows of one tenant, or of all."""
    rows = store.usage(start, end)
    cost = cost_of(rows, store.gpu(start, end), dollars_per_hour)
    chosen = [row for row in rows if tenant in (None, row.tenant)]
    return UsageReport(chosen, cost, dollars_per_hour)

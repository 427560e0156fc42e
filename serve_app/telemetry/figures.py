"""What a server does, in numbers, from readings of its metrics: as a whole, and its models, engines
and tenants. How they are shown is another's business.

It knows the metrics by name; that there are all of them, a test says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.telemetry.readings import Readings

STATES = ("requests", "surplus", "bubble", "starved", "spare", "starting")
"""Of a device."""
QUANTILES = (0.5, 0.95, 0.99)
CONTENDS = 0.5
"""Part of the readings in which a tenant waits for others, or for places, before it contends."""
Key = tuple[str, ...]
Tails = tuple[float | None, ...]
"""Seconds by `QUANTILES`; None while nothing was observed."""


@dataclass(frozen=True, slots=True)
class Whole:
    """All models and tenants together."""

    running: float
    waiting: float
    requests_per_s: float
    prompt_per_s: float
    """Tokens that were computed."""
    output_per_s: float
    refused_per_s: float
    kv_used: float
    """Of the engine with the least room."""
    dollars_per_hour: float
    first_token_s: Tails
    gap_s: Tails


@dataclass(frozen=True, slots=True)
class Model:
    model: str
    replicas: float
    slots: float
    free: float
    requests_per_s: float
    output_per_s: float
    first_token_s: Tails
    gap_s: Tails


@dataclass(frozen=True, slots=True)
class Engine:
    model: str
    replica: str
    device: Mapping[str, float]
    """Shares of its device's time, by state; empty while it has told nothing new."""
    running: float
    waiting: float
    kv_used: float
    kv_fragmented: float
    output_per_s: float


@dataclass(frozen=True, slots=True)
class Tenant:
    tenant: str
    weight: float | None
    running: float | None
    waiting: float | None
    held_back: tuple[str, ...]
    ahead: float | None
    share: float
    """Of the service that all tenants had."""
    fair_share: float
    """What by weight it would be: who does not contend has what it asks for, and the others share
    the rest. Priority bands are left out of this."""
    output_per_s: float
    refused: float
    refused_per_s: float
    dollars: float
    dollars_per_hour: float
    rates_left: Mapping[str, float]
    budgets_left: Mapping[str, float]


def whole(recent: Readings, window: Readings) -> Whole:
    """Rates are of `recent`, tails of the whole window."""
    tokens = recent.rate("fairstream_engine_tokens_total", "kind")
    used = recent.value("fairstream_kv_usage_ratio", "model", "replica").values()
    return Whole(
        running=_one(recent.value("fairstream_requests_running")),
        waiting=_one(recent.value("fairstream_requests_waiting")),
        requests_per_s=_one(recent.rate("fairstream_request_seconds_count")),
        prompt_per_s=tokens.get(("prompt",), 0.0),
        output_per_s=tokens.get(("output",), 0.0),
        refused_per_s=_one(recent.rate("fairstream_refusals_total")),
        kv_used=max(used, default=0.0),
        dollars_per_hour=3600 * _one(window.rate("fairstream_dollars_total")),
        first_token_s=_tails(window, "fairstream_first_token_seconds")[()],
        gap_s=_tails(window, "fairstream_gap_seconds")[()],
    )


def models(readings: Readings) -> list[Model]:
    """By name."""
    replicas = readings.value("fairstream_replicas", "model")
    slots = readings.value("fairstream_slots", "model")
    free = readings.value("fairstream_credits", "model")
    requests = readings.rate("fairstream_request_seconds_count", "model")
    output = readings.rate("fairstream_engine_tokens_total", "model", kind="output")
    first_token = _tails(readings, "fairstream_first_token_seconds", "model")
    gap = _tails(readings, "fairstream_gap_seconds", "model")
    return [
        Model(
            model=one[0],
            replicas=replicas.get(one, 0.0),
            slots=slots[one],
            free=free.get(one, 0.0),
            requests_per_s=requests.get(one, 0.0),
            output_per_s=output.get(one, 0.0),
            first_token_s=first_token[one],
            gap_s=gap[one],
        )
        for one in sorted(slots)
    ]


def device(readings: Readings) -> dict[str, float]:
    """Shares of all devices' time, by state; empty while nothing new was told."""
    grown = readings.growth("fairstream_gpu_seconds_total", "state")
    return _shares({state: seconds for (state,), seconds in grown.items()})


def engines(readings: Readings) -> list[Engine]:
    """By name of the model and the replica."""
    by = ("model", "replica")
    spent = defaultdict[Key, dict[str, float]](dict)
    for (*one, state), seconds in readings.growth(
        "fairstream_gpu_seconds_total", *by, "state"
    ).items():
        spent[tuple(one)][state] = seconds
    sequences = "fairstream_engine_requests"
    running = readings.value(sequences, *by, state="running")
    waiting = readings.value(sequences, *by, state="waiting")
    used = readings.value("fairstream_kv_usage_ratio", *by)
    fragmented = readings.value("fairstream_kv_fragmented_ratio", *by)
    output = readings.rate("fairstream_engine_tokens_total", *by, kind="output")
    return [
        Engine(
            model=one[0],
            replica=one[1],
            device=_shares(spent[one]),
            running=running.get(one, 0.0),
            waiting=waiting.get(one, 0.0),
            kv_used=used.get(one, 0.0),
            kv_fragmented=fragmented.get(one, 0.0),
            output_per_s=output.get(one, 0.0),
        )
        for one in sorted(readings.value("fairstream_rows", *by))
    ]


def tenants(readings: Readings) -> list[Tenant]:
    """Those with the most output first."""
    service = readings.growth("fairstream_service_total", "tenant", "model")
    shares, fair_shares = _parts(service), _parts(_fair(readings, service))
    weight = readings.value("fairstream_weight", "tenant")
    running = readings.value("fairstream_requests_running", "tenant")
    waiting = readings.value("fairstream_requests_waiting", "tenant")
    held = _nested(readings.value("fairstream_held_back", "tenant", "reason"))
    ahead = readings.value("fairstream_service_ahead", "tenant")
    output = readings.rate("fairstream_tokens_total", "tenant", kind="output")
    refused = readings.value("fairstream_refusals_total", "tenant")
    refusals = readings.rate("fairstream_refusals_total", "tenant")
    dollars = readings.value("fairstream_dollars_total", "tenant")
    spending = readings.rate("fairstream_dollars_total", "tenant")
    rates = _nested(readings.value("fairstream_rate_left", "tenant", "limit"))
    budgets = _nested(readings.value("fairstream_budget_left_dollars", "tenant", "period"))
    found = [
        Tenant(
            tenant=one[0],
            weight=weight.get(one),
            running=running.get(one),
            waiting=waiting.get(one),
            held_back=tuple(why for why, value in held[one[0]].items() if value),
            ahead=ahead.get(one),
            share=shares.get(one[0], 0.0),
            fair_share=fair_shares.get(one[0], 0.0),
            output_per_s=output.get(one, 0.0),
            refused=refused.get(one, 0.0),
            refused_per_s=refusals.get(one, 0.0),
            dollars=dollars.get(one, 0.0),
            dollars_per_hour=3600 * spending.get(one, 0.0),
            rates_left=rates[one[0]],
            budgets_left=budgets[one[0]],
        )
        for one in output.keys() | waiting.keys() | refusals.keys()
    ]
    return sorted(
        found,
        key=lambda one: (-one.output_per_s, -(one.waiting or 0), -one.refused_per_s, one.tenant),
    )


def _fair(readings: Readings, service: Mapping[Key, float]) -> dict[Key, float]:
    """Service by tenant and model, if each model's had gone by weight."""
    waits = readings.mean("fairstream_held_back", "tenant", "model", "reason")
    weights = readings.value("fairstream_weight", "tenant")
    contends = {
        one
        for one in service
        if sum(waits.get((*one, why), 0.0) for why in ("fair_share", "capacity")) >= CONTENDS
    }
    shared, weighed = defaultdict[str, float](float), defaultdict[str, float](float)
    for tenant, model in contends:
        shared[model] += service[tenant, model]
        weighed[model] += weights.get((tenant,), 1.0)
    fair = dict(service)
    for tenant, model in contends:
        fair[tenant, model] = shared[model] * weights.get((tenant,), 1.0) / weighed[model]
    return fair


def _parts(service: Mapping[Key, float]) -> dict[str, float]:
    """Of the whole, by tenant."""
    total, parts = sum(service.values()), defaultdict[str, float](float)
    for (tenant, _), cost in service.items():
        parts[tenant] += cost / total if total else 0.0
    return dict(parts)


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {state: seconds.get(state, 0.0) / total for state in STATES} if total else {}


def _tails(readings: Readings, name: str, *by: str) -> defaultdict[Key, Tails]:
    found = [readings.quantile(share, name, *by) for share in QUANTILES]
    tails = defaultdict[Key, Tails](lambda: (None,) * len(QUANTILES))
    for key in found[0]:
        tails[key] = tuple(each.get(key) for each in found)
    return tails


def _nested(values: Mapping[Key, float]) -> defaultdict[str, dict[str, float]]:
    """By the first label, then the second."""
    nested = defaultdict[str, dict[str, float]](dict)
    for (first, second), value in sorted(values.items()):
        nested[first][second] = value
    return nested


def _one(values: Mapping[Key, float]) -> float:
    """The sum of all series."""
    return values.get((), 0.0)

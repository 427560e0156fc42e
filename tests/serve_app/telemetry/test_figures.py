"""What a server does, in numbers. That each metric is one that is told, `test_top` says."""

from __future__ import annotations

import pytest

from serve_app.telemetry import figures
from serve_app.telemetry.exposition import merged
from serve_app.telemetry.readings import Readings, Scrape, gathered
from tests.serve_app.told_service import Service

Served = dict[tuple[str, str], float]
"""By tenant and model."""


def readings(served: Served, waits: dict[tuple[str, str], str], **weights: float) -> Readings:
    """waits: why the tenant's next request for the model waits."""

    def at(seconds: float) -> Scrape:
        service = {
            (("model", model), ("tenant", tenant)): cost * seconds
            for (tenant, model), cost in served.items()
        }
        held = {
            (("model", model), ("reason", why), ("tenant", tenant)): 1.0
            for (tenant, model), why in waits.items()
        }
        weight = {(("tenant", tenant),): value for tenant, value in weights.items()}
        names = dict.fromkeys(tenant for tenant, _ in served)
        waiting = {(("tenant", tenant),): 1.0 for tenant in names}
        told = {
            "fairstream_service_total": service,
            "fairstream_held_back": held,
            "fairstream_weight": weight,
            "fairstream_requests_waiting": waiting,
        }
        return Scrape(seconds, told)

    return Readings([at(seconds) for seconds in (0.0, 1.0, 2.0)])


def shares(of: Readings) -> dict[str, tuple[float, float]]:
    """What each had, and what would be fair."""
    found = figures.tenants(of)
    return {each.tenant: (round(each.share, 6), round(each.fair_share, 6)) for each in found}


def test_who_contends_shares_by_weight_what_the_others_leave() -> None:
    served = {("a", "m"): 30.0, ("b", "m"): 50.0, ("modest", "m"): 20.0}
    waits = {("a", "m"): "fair_share", ("b", "m"): "capacity"}
    found = shares(readings(served, waits, a=1.0, b=3.0, modest=9.0))
    assert found == {"a": (0.3, 0.2), "b": (0.5, 0.6), "modest": (0.2, 0.2)}


def test_who_waits_for_itself_has_what_is_fair() -> None:
    served = {("a", "m"): 30.0, ("b", "m"): 70.0}
    waits = {("a", "m"): "concurrency", ("b", "m"): "capacity"}
    assert shares(readings(served, waits)) == {"a": (0.3, 0.3), "b": (0.7, 0.7)}


def test_a_tenant_has_no_claim_on_a_model_that_it_does_not_ask_for() -> None:
    served = {("a", "m"): 40.0, ("b", "m"): 20.0, ("b", "n"): 40.0}
    waits = dict.fromkeys(served, "fair_share")
    assert shares(readings(served, waits)) == {"a": (0.4, 0.3), "b": (0.6, 0.7)}


def test_nobody_was_served() -> None:
    assert shares(readings({("a", "m"): 0.0}, {})) == {"a": (0.0, 0.0)}
    assert figures.tenants(Readings([Scrape(0.0, {}), Scrape(1.0, {})])) == []


def test_an_engine_that_has_told_nothing_new_has_no_shares() -> None:
    service = Service()
    first = Readings([scrape_of(service, at) for at in (0.0, 2.0)])
    [engine] = figures.engines(first)
    assert engine.device["bubble"] == pytest.approx(0.125)
    assert sum(engine.device.values()) == pytest.approx(1.0)
    assert figures.device(first) == engine.device
    same = scrape_of(service, 4.0)
    still = Readings([same, same._replace(at=5.0)])
    assert figures.engines(still)[0].device == figures.device(still) == {}


def test_tails_are_in_seconds_and_none_where_nothing_was_observed() -> None:
    service = Service()
    window = Readings([scrape_of(service, at) for at in (0.0, 2.0)])
    found = figures.whole(window, window)
    assert found.first_token_s == pytest.approx((1.75, 2.425, 2.485))
    assert all(0.03 < seconds < 0.06 for seconds in found.gap_s if seconds)
    assert (found.output_per_s, found.running, found.kv_used) == (75.0, 3.0, 1.0)
    nothing = Readings([Scrape(0.0, {}), Scrape(1.0, {})])
    assert figures.whole(nothing, nothing).gap_s == (None, None, None)


def scrape_of(service: Service, at: float) -> Scrape:
    return gathered(merged(service.sources()).values(), at)

"""What `python -m benchmarks.fairness --parts on_off` makes of what clients saw."""

from __future__ import annotations

import pytest

from benchmarks.fair_on_off import (
    BURST,
    BURSTS,
    CONFIG,
    OPEN_REQUESTS,
    STEADY,
    Meter,
    bound,
    largest_difference,
    settings,
)
from router.tenant import Tenants

ALTERNATING = [STEADY, BURSTS] * 50
SAVED_UP = [BURSTS] * 50 + [STEADY] * 50


def difference(served: list[str], start: float = 0.0) -> float:
    """Of services of 10, one a second, from `start` on."""
    meter = Meter(settings(CONFIG).fairness, "model")
    meter.seen = [(float(when), key, 10.0) for when, key in enumerate(served)]
    return largest_difference(*meter.course(start, len(served)))


def test_the_difference_is_the_largest_of_all_windows() -> None:
    assert difference(ALTERNATING) == 10.0
    assert difference(SAVED_UP) == 500.0
    assert difference([STEADY] * 30 + [BURSTS] * 40 + [STEADY] * 10) == 400.0


def test_what_was_served_before_a_burst_does_not_count() -> None:
    assert difference([STEADY] * 100 + ALTERNATING, start=100.0) == 10.0


def test_the_bound_is_that_of_what_the_server_has_in_flight() -> None:
    """4 rows, prompts of 8, answers of 12: 2 * (8 + 4 * 24 + 4 * (8 + 24))."""
    assert bound(settings(CONFIG)) == 464.0


def test_bursts_served_as_they_come_would_overstep_it() -> None:
    allowed = bound(settings(CONFIG))
    rows = settings(CONFIG).served[0].engine.max_rows
    more = OPEN_REQUESTS[BURSTS] - OPEN_REQUESTS[STEADY]
    assert BURST * allowed * more / sum(OPEN_REQUESTS.values()) > 1.4 * allowed
    assert min(OPEN_REQUESTS.values()) >= 3 * rows


@pytest.mark.parametrize("key", [STEADY, BURSTS])
def test_the_server_knows_both_and_lets_all_of_it_wait(key: str) -> None:
    config = settings(CONFIG)
    tenant = Tenants.model_validate({"tenants": config.tenants}).find_by_key(key)
    assert tenant is not None
    assert tenant.max_concurrency >= config.served[0].engine.max_rows
    assert tenant.max_queued >= OPEN_REQUESTS[key]

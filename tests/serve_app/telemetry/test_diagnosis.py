"""What limits a server, told from figures that were planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.telemetry.diagnosis import Cause, Facts, diagnose, lines
from serve_app.telemetry.readings import Readings, Scrape

HEALTHY = Facts(
    seconds=30.0,
    requests=100.0,
    device={"requests": 0.7, "surplus": 0.03, "bubble": 0.02, "starved": 0.0, "spare": 0.25},
    phases={"read": 0.02, "prepare": 0.03, "admission": 0.05, "prefill": 0.2, "decode": 0.7},
    held_back={},
    limited={},
    preempted=0.0,
    ended=100.0,
    kv_used=0.5,
    free=0.0,
    output_per_s=1000.0,
    limits={"weights": 0.4, "tokens": 0.3, "keys": 0.3},
)
FULL = {"requests": 0.97, "spare": 0.01}


@pytest.mark.parametrize(
    ("planted", "cause"),
    [
        ({}, Cause.NOTHING),
        ({"seconds": 3.0}, Cause.TOO_LITTLE),
        ({"device": {}}, Cause.TOO_LITTLE),
        ({"requests": 1.0}, Cause.TOO_LITTLE),
        ({"device": {"requests": 0.02, "spare": 0.98}}, Cause.NO_DEMAND),
        ({"device": {"requests": 0.5, "bubble": 0.3, "spare": 0.2}}, Cause.CPU),
        ({"device": {"requests": 0.5, "starved": 0.4, "spare": 0.1}}, Cause.FEEDING),
        ({"preempted": 20.0}, Cause.KV),
        ({"preempted": 2.0, "ended": 0.0}, Cause.KV),
        ({"held_back": {"capacity": ["a"]}, "free": 0.5}, Cause.KV),
        # Places are kept for newcomers.
        (
            {"device": FULL, "held_back": {"capacity": ["a"]}, "free": 0.17},
            Cause.DEVICE,
        ),
        ({"device": FULL, "held_back": {"concurrency": ["a"]}, "free": 0.9}, Cause.QUOTA),
        ({"phases": {"send": 0.6, "decode": 0.4}}, Cause.SLOW_READERS),
        ({"phases": {"prepare": 0.5, "text": 0.1, "decode": 0.4}}, Cause.FRONT_END),
        ({"device": FULL, "phases": {"prefill": 0.8, "decode": 0.2}}, Cause.PROMPTS),
        ({"device": FULL, "held_back": {"capacity": ["a"], "fair_share": ["b"]}}, Cause.DEVICE),
        (
            {
                "device": FULL,
                "held_back": {"capacity": ["a"]},
                "kv_used": 0.1,
                "limits": {"weights": 0.8, "tokens": 0.2},
            },
            Cause.PLACES,
        ),
        ({"device": FULL}, Cause.NOTHING),
        (
            {"device": {"requests": 0.2, "spare": 0.8}, "held_back": {"concurrency": ["a"]}},
            Cause.QUOTA,
        ),
        ({"device": {"requests": 0.05, "spare": 0.95}, "limited": {"a": 400.0}}, Cause.QUOTA),
        ({"device": FULL, "limited": {"a": 400.0}}, Cause.NOTHING),
    ],
)
def test_each_cause_is_named(planted: dict[str, Any], cause: Cause) -> None:
    facts = replace(HEALTHY, **planted)
    verdict = diagnose(facts)
    assert verdict.cause is cause
    first, *rest = lines(verdict, facts)
    assert first == cause.value
    assert all(len(line) < 140 for line in rest)


def test_what_it_would_be_worth() -> None:
    facts = replace(HEALTHY, device={"requests": 0.5, "bubble": 0.25, "spare": 0.25})
    assert diagnose(facts).worth == "up to 500 tokens/s more, of 1,000 now"


def test_what_more_places_would_be_worth() -> None:
    limits = {"weights": 0.8, "keys": 0.1, "tokens": 0.1}
    few = replace(HEALTHY, held_back={"capacity": ["a"]}, kv_used=0.1, limits=limits)
    assert diagnose(few).worth.startswith("about 667 tokens/s more with twice the rows, of 1,000")
    full = replace(few, kv_used=0.9)
    assert "90% of it reads memory, 10% is arithmetic" in diagnose(full).evidence


def test_facts_are_read_from_metrics() -> None:
    """Shares over the window, and who waits in most readings."""

    def reading(at: float, seconds: float, is_held: float) -> Scrape:
        def one(value: float, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
            return {tuple(sorted(labels.items())): value}

        states = one(seconds, state="requests") | one(3 * seconds, state="spare")
        refused = one(seconds, tenant="a", reason="rate_limit_exceeded", ingress="i")
        refused |= one(seconds, tenant="-", reason="invalid_api_key", ingress="i")
        held = one(is_held, tenant="a", model="m", reason="capacity")
        return Scrape(
            at,
            {
                "fairstream_gpu_seconds_total": states,
                "fairstream_refusals_total": refused,
                "fairstream_held_back": held | one(0.0, tenant="b", model="m", reason="capacity"),
                "fairstream_request_seconds_count": one(seconds, model="m", tenant="a"),
            },
        )

    facts = Facts.of(Readings([reading(0, 10, 1), reading(5, 12, 0), reading(10, 14, 1)]))
    assert facts.seconds == 10
    assert facts.device == {"requests": 0.25, "spare": 0.75}
    assert facts.held_back == {"capacity": ["a"]}
    assert facts.limited == {"a": 4.0}
    assert facts.requests == 4.0
    assert facts.phases == {}

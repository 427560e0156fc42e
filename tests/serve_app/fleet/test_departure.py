"""What a process does that is being removed; Serve is a flag here."""

from __future__ import annotations

import time

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from serve_app.fleet import departure as module
from serve_app.fleet.departure import Departure, TurnAway

HERE, GONE = {"other", "me"}, {"other"}
"""Whom Serve routes to."""


def told(*members: set[str], grace_s: float = 60.0) -> Departure:
    """After each of these was told to it."""
    departure = Departure("me", grace_s)
    for names in members:
        departure.learn(names)
    return departure


def test_a_process_that_is_not_up_yet_does_not_leave() -> None:
    departure = told(GONE, GONE)
    assert not departure.routed
    assert not departure.leaves
    assert departure.takes_stragglers


def test_a_process_leaves_once_it_is_no_longer_routed_to() -> None:
    departure = told(GONE, HERE)
    assert departure.routed
    assert not departure.leaves
    departure = told(HERE, GONE, GONE)
    assert not departure.routed
    assert departure.leaves
    assert not departure.late


def test_a_process_that_is_routed_to_again_stays() -> None:
    assert not told(HERE, GONE, HERE).leaves


@pytest.mark.parametrize("later", [HERE, GONE])
def test_a_process_that_is_dismissed_leaves_for_good(
    later: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever Serve says, and counted from the first time that it is told."""
    departure = told(HERE, grace_s=4.0)
    departure.dismiss()
    assert departure.leaves
    assert not departure.late
    now = time.monotonic() + 2.5
    monkeypatch.setattr(time, "monotonic", lambda: now)
    departure.learn(later)
    departure.dismiss()
    assert departure.leaves
    assert departure.late


@pytest.mark.parametrize(("grace_s", "stay_s"), [(60.0, 57.0), (4.0, 2.0)])
def test_what_is_left_is_given_up_before_the_grace_ends(
    grace_s: float, stay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    departure = told(HERE, GONE, grace_s=grace_s)
    noticed_at, clock = time.monotonic(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: noticed_at + stay_s - 0.5)
    assert not departure.late
    monkeypatch.setattr(time, "monotonic", lambda: noticed_at + stay_s + 0.5)
    assert departure.late
    monkeypatch.setattr(time, "monotonic", clock)


async def ask(departure: Departure, path: str) -> httpx.Response:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    transport = httpx.ASGITransport(TurnAway(app, departure))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.get(path)


async def test_who_comes_when_the_whole_service_ends_is_turned_away_at_once() -> None:
    departure = told(HERE)
    departure.dismiss()
    for path in ("/ready", "/v1/models"):
        assert (await ask(departure, path)).status_code == 503
    assert (await ask(departure, "/health")).status_code == 200


async def test_answers_are_counted_until_they_are_out_or_fail() -> None:
    departure = told(HERE)
    counts: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        counts.append(departure.answers)
        raise ConnectionError

    transport = httpx.ASGITransport(TurnAway(app, departure))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for path in ("/v1/models", "/v1/completions"):
            with pytest.raises(ConnectionError):
                await client.get(path)
    assert counts == [1, 1]
    assert departure.answers == 0


async def test_new_requests_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """C35: readiness is false at once; those that were on their way are still served."""
    stays, leaves = told(HERE), told(HERE, GONE)
    for path in ("/ready", "/health", "/v1/models"):
        assert (await ask(stays, path)).status_code == 200
    assert (await ask(leaves, "/ready")).status_code == 503
    assert (await ask(leaves, "/v1/models")).status_code == 200
    monkeypatch.setattr(module, "STRAGGLERS_S", 0.0)
    answer = await ask(leaves, "/v1/models")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"
    assert answer.json()["error"]["code"] == "unavailable"
    assert (await ask(leaves, "/health")).status_code == 200

"""What a process does that is being removed; Serve is a flag here."""

from __future__ import annotations

import asyncio
import logging
import time

import httpx
import pytest
from ray.serve.exceptions import ReplicaUnavailableError
from starlette.types import Receive, Scope, Send

from serve_app import departure as module
from serve_app.departure import Departure, TurnAway, log_no_call_to_self


class Serve:
    """Routes to the process, or not, or cannot say."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    async def call(self) -> None:
        if self.error is not None:
            raise self.error


GONE = ReplicaUnavailableError("me")


async def looked(*errors: Exception | None, grace_s: float = 60.0) -> Departure:
    """After one look for each."""
    serve = Serve()
    departure = Departure(serve.call, grace_s)
    for serve.error in errors:
        await departure.look()
    return departure


async def test_a_process_that_is_not_up_yet_does_not_leave() -> None:
    departure = await looked(GONE, GONE)
    assert not departure.routed
    assert not departure.leaves
    assert departure.takes_stragglers


async def test_a_process_leaves_once_it_is_no_longer_routed_to() -> None:
    departure = await looked(GONE, None)
    assert departure.routed
    assert not departure.leaves
    departure = await looked(None, GONE, GONE)
    assert not departure.routed
    assert departure.leaves
    assert not departure.late


@pytest.mark.parametrize("before", [None, GONE])
async def test_a_call_that_fails_says_nothing(before: Exception | None) -> None:
    departure = await looked(before, ConnectionError())
    assert departure.routed == (before is None)
    assert not departure.leaves


async def test_a_call_that_hangs_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_TIMEOUT_S", 0.01)
    departure = Departure(lambda: asyncio.sleep(5), 60.0)
    await departure.look()
    assert not departure.routed


async def test_a_process_that_is_routed_to_again_stays() -> None:
    assert not (await looked(None, GONE, None)).leaves


@pytest.mark.parametrize("later", [None, GONE])
async def test_a_process_that_is_dismissed_leaves_for_good(later: Exception | None) -> None:
    """Whatever Serve says, and counted from the first time that it is told."""
    serve = Serve()
    departure = Departure(serve.call, grace_s=0.4)
    await departure.look()
    departure.dismiss()
    assert departure.leaves
    assert not departure.late
    await asyncio.sleep(0.25)
    serve.error = later
    await departure.look()
    departure.dismiss()
    assert departure.leaves
    assert departure.late


@pytest.mark.parametrize(("grace_s", "stay_s"), [(60.0, 57.0), (4.0, 2.0)])
async def test_what_is_left_is_given_up_before_the_grace_ends(
    grace_s: float, stay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    departure = await looked(None, GONE, grace_s=grace_s)
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
    departure = await looked(None)
    departure.dismiss()
    for path in ("/ready", "/v1/models"):
        assert (await ask(departure, path)).status_code == 503
    assert (await ask(departure, "/health")).status_code == 200


async def test_answers_are_counted_until_they_are_out_or_fail() -> None:
    departure = await looked(None)
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
    stays, leaves = await looked(None), await looked(None, GONE)
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


def test_serve_logs_no_call_of_a_process_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    logs = logging.getLogger("ray.serve")
    before = list(logs.filters)
    log_no_call_to_self("is_here")
    try:
        with caplog.at_level(logging.INFO, "ray.serve"):
            for line in ("CALL is_here OK 0.7ms", "CALL is_here ERROR 0.7ms", "POST /v1/x 200 9ms"):
                logs.info(line)
    finally:
        logs.filters[:] = before
    assert caplog.messages == ["CALL is_here ERROR 0.7ms", "POST /v1/x 200 9ms"]

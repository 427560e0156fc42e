"""What refusals cost, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from router.tenant import Tenant, Tenants, digest
from serve_app.http.models import Offer
from serve_app.protocol.limits import Limits
from serve_app.throttling.refusal_limit import BYTES_PER_UNIT, MAX_PAYERS, RefusalLimit
from tests.router.world import Clock
from tests.serve_app.conftest import serve_offers
from tests.serve_app.metered_site import metered_site
from tests.serve_app.text_backend import TextBackend

CHAT = "/v1/chat/completions"
LIMIT = 6
GOOD = {"model": "text", "messages": [{"role": "user", "content": "hi"}]}
BAD = GOOD | {"n": 0}


@pytest.fixture
def calls(tokenizer: Any) -> Iterator[httpx.Client]:
    """Two tenants with keys, and one for who has none."""
    tenants = [Tenant(id=name, keys=[digest(name)]) for name in ("a", "b")]
    tenants.append(Tenant(id="guest", anonymous=True))
    limits = Limits(refusals_per_minute=LIMIT)
    offer = Offer("text", TextBackend(), tokenizer)
    with (
        serve_offers([offer], limits, Tenants(tenants=tenants)) as site,
        httpx.Client(base_url=site.url) as client,
    ):
        yield client


def ask(calls: httpx.Client, body: dict[str, Any], key: str | None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return calls.post(CHAT, json=body, headers=headers)


def exhaust(calls: httpx.Client, key: str | None, body: dict[str, Any] = BAD) -> list[int]:
    statuses = [ask(calls, body, key).status_code for _ in range(LIMIT + 4)]
    assert statuses == sorted(statuses)
    return statuses


@pytest.mark.parametrize("body", [BAD, GOOD | {"model": "none"}, {}])
def test_who_is_refused_too_often_has_to_wait(calls: httpx.Client, body: dict[str, Any]) -> None:
    assert exhaust(calls, "a", body)[-1] == 429
    reply = ask(calls, GOOD, "a")
    assert reply.status_code == 429
    assert reply.json()["error"]["code"] == "too_many_refusals"
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert int(reply.headers["retry-after"]) in range(1, 11)
    for other in ("b", None):
        assert ask(calls, GOOD, other).status_code == 200


@pytest.mark.parametrize("key", ["wrong", None])
def test_an_address_without_a_key_has_to_wait_and_keys_at_it_do_not(
    calls: httpx.Client, key: str | None
) -> None:
    """Many are behind one address."""
    assert exhaust(calls, key)[-1] == 429
    assert ask(calls, GOOD, None).status_code == 429
    assert ask(calls, GOOD, "a").status_code == 200
    assert calls.get("/health").status_code == 200


def test_what_is_served_costs_nothing(calls: httpx.Client) -> None:
    assert {ask(calls, GOOD, "a").status_code for _ in range(2 * LIMIT)} == {200}


def test_a_refusal_costs_what_of_its_body_was_read(calls: httpx.Client) -> None:
    body = BAD | {"user": "x" * 2 * BYTES_PER_UNIT}
    assert [ask(calls, body, "a").status_code for _ in range(3)] == [400, 400, 429]


async def test_headers_tell_of_refusals_and_the_quota_does_not_count_them() -> None:
    limits = Limits(refusals_per_minute=LIMIT)
    async with metered_site(limits=limits, a={"requests_per_minute": 60}) as site:
        left = [
            int((await site.ask(n=0)).headers["x-ratelimit-remaining-requests"])
            for _ in range(LIMIT + 2)
        ]
        assert left[0] == LIMIT - 1
        assert left[-1] == 0
        stranger = await site.calls.post("/v1/completions")
        told = [stranger.headers[f"x-ratelimit-{what}-refusals"] for what in ("limit", "remaining")]
        assert told == [str(LIMIT), str(LIMIT - 1)]
        reply = await site.ask()
        assert reply.status_code == 429
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"
        assert reply.headers["x-ratelimit-reset-requests"] != "0s"
        assert (
            site.client.rate_limits(Tenant(id="a", requests_per_minute=60)).requests.remaining == 60
        )


async def test_a_rate_does_not_cost_a_second_time() -> None:
    limits = Limits(refusals_per_minute=5)
    async with metered_site(limits=limits, a={"requests_per_minute": 1}) as site:
        replies = [await site.ask() for _ in range(12)]
        assert {reply.status_code for reply in replies} == {200, 429}
        assert {reply.json()["error"]["code"] for reply in replies[1:]} == {"rate_limit_exceeded"}


async def charge(refusal_limit: RefusalLimit, name: str, read: int = 0, status: int = 400) -> int:
    """The status that one gets who sends so many bytes, and would get `status`."""
    told: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if status == 0:
            raise ClientDisconnect
        await send({"type": "http.response.start", "status": status})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * read}

    async def send(message: Any) -> None:
        if "status" in message:
            told.append(message["status"])

    scope: Any = {"type": "http", "state": {"checked": status == 0 and name == "checked"}}
    await refusal_limit.serve(("tenant", name), app, scope, receive, send)
    return told[0]


async def test_a_debt_is_over_after_two_minutes() -> None:
    clock = Clock()
    refusal_limit = RefusalLimit(10, clock)
    await asyncio.gather(*(charge(refusal_limit, "a", 100 * BYTES_PER_UNIT) for _ in range(24)))
    clock.now += 60
    assert await charge(refusal_limit, "a") == 429
    clock.now += 10
    assert await charge(refusal_limit, "a") == 400


@pytest.mark.parametrize(("name", "after"), [("hasty", 429), ("checked", 400)])
async def test_who_hangs_up_before_the_request_is_checked_pays(name: str, after: int) -> None:
    refusal_limit = RefusalLimit(10, Clock())
    with pytest.raises(ClientDisconnect):
        await charge(refusal_limit, name, 20 * BYTES_PER_UNIT, status=0)
    assert await charge(refusal_limit, name) == after


@pytest.mark.parametrize("status", [200, 500, 503])
async def test_nobody_pays_for_what_is_not_their_fault(status: int) -> None:
    refusal_limit = RefusalLimit(1, Clock())
    assert [await charge(refusal_limit, "a", BYTES_PER_UNIT, status) for _ in range(3)] == [
        status
    ] * 3


async def test_so_many_payers_are_remembered_and_no_more() -> None:
    refusal_limit = RefusalLimit(1, Clock())
    for number in range(MAX_PAYERS + 1):
        await charge(refusal_limit, str(number))
    assert await charge(refusal_limit, "0") == 400
    assert await charge(refusal_limit, str(MAX_PAYERS)) == 429

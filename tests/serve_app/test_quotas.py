"""Quotas as clients see them, over real HTTP."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from router.messages import Outcome
from router.policy import FairPolicy
from router.quota import SPENT_S
from tests.router.world import Clock
from tests.serve_app.metered_site import key_of, metered_site, occupy, until

HEADERS = [f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens")
           for what in ("limit", "remaining", "reset")]  # fmt: skip
METERED = {"requests_per_minute": 100, "tokens_per_minute": 10_000}


def error_of(reply: httpx.Response, status: int, code: str) -> dict[str, str]:
    """The error, in OpenAI's shape."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert re.fullmatch("[1-9][0-9]*", reply.headers["retry-after"])
    return error


async def test_a_refused_request_uses_no_unit_of_another_limit() -> None:
    """C52: rpm=2, concurrency 1, no queue: A runs, B is refused, A ends, C is served."""
    limits = {"requests_per_minute": 2, "max_concurrency": 1, "max_queued": 0}
    async with metered_site(a=limits) as site:
        first = await occupy(site)
        error_of(await site.ask(), 429, "rate_limit_exceeded")
        assert (await first).status_code == 200
        await site.settled()
        last = await site.ask()
        assert last.status_code == 200
        assert last.headers["x-ratelimit-remaining-requests"] == "0"


async def test_refusals_leave_what_remains_alone() -> None:
    """C49: 50 of 100 tokens used; ten requests for 90 are refused, one for 40 is served."""
    async with metered_site(a={"tokens_per_minute": 100}) as site:
        assert (await site.ask(max_tokens=45)).status_code == 200
        await site.settled()
        replies = await asyncio.gather(*(site.ask(max_tokens=85) for _ in range(10)))
        for reply in replies:
            error_of(reply, 429, "rate_limit_exceeded")
            assert 50 <= int(reply.headers["x-ratelimit-remaining-tokens"]) < 90
        assert (await site.ask(max_tokens=35)).status_code == 200


async def test_of_a_refused_request_no_choice_is_charged() -> None:
    """C52: two choices where one may wait."""
    limits = {"requests_per_minute": 2, "max_concurrency": 1, "max_queued": 1}
    async with metered_site(step_s=0.002, a=limits | {"daily_budget": 1.0}) as site:
        running = await occupy(site)
        reply = await site.ask(n=2)
        error_of(reply, 429, "rate_limit_exceeded")
        assert reply.headers["x-ratelimit-remaining-requests"] == "1"
        assert (await running).status_code == 200
        assert (await site.ask(n=2)).headers["x-ratelimit-remaining-requests"] == "0"
        await site.settled()
        assert site.spent() == 5 + 2 * 900 + 2 * (5 + 2 * 20)
        assert site.admission.router.snapshot().usage["a"].outcomes[Outcome.CANCELLED] == 0


async def test_a_restarted_admission_refuses_nothing_that_waits() -> None:
    """Its rate counts what waits already."""
    limits = {"requests_per_minute": 4, "max_concurrency": 1}
    async with metered_site(step_s=0.002, a=limits) as site:
        asking = [asyncio.create_task(site.ask(max_tokens=200)) for _ in range(4)]
        await until(lambda: site.admission.router.snapshot().queued == 3)
        count = len(site.admission.syncs)
        await until(lambda: len(site.admission.syncs) > count + 1)
        site.admission.restart()
        assert [(await task).status_code for task in asking] == [200] * 4
        error_of(await site.ask(), 429, "rate_limit_exceeded")


async def test_a_default_limit_above_the_cap_is_no_reason_to_refuse() -> None:
    """R38: tokens_per_minute=100 and no max_tokens."""
    async with metered_site(a={"tokens_per_minute": 100}) as site:
        reply = await site.ask(max_tokens=None)
        assert reply.status_code == 200
        await site.settled()
        used = reply.json()["usage"]["total_tokens"]
        after = await site.ask(max_tokens=1)
        remaining = int(after.headers["x-ratelimit-remaining-tokens"])
        assert 100 - used - 6 <= remaining <= 100 - used - 6 + 5


@pytest.mark.parametrize("limits", [{"requests_per_minute": 3}, {"tokens_per_minute": 75}])
async def test_a_restarted_admission_does_not_forgive_the_last_minute(
    limits: dict[str, int],
) -> None:
    """Nor once the tenant has been silent meanwhile, and is not in the last reply."""
    async with metered_site(a=limits, b={}) as site:
        for _ in range(3):
            assert (await site.ask(max_tokens=20)).status_code == 200
            await site.settled()
        await site.ask("b", max_tokens=1)
        await site.settled()
        for _ in range(2):
            site.admission.restart()
            await until(lambda: site.client.epoch == site.admission.router.epoch)
            count = len(site.admission.syncs)
            await until(lambda count=count: len(site.admission.syncs) > count + 1)
            error_of(await site.ask(max_tokens=20), 429, "rate_limit_exceeded")


@pytest.mark.parametrize("limits", [{"requests_per_minute": 30}, {"tokens_per_minute": 750}])
async def test_who_waits_as_long_as_told_is_served(limits: dict[str, int]) -> None:
    """C40: every limit says when to come back; the header for resets agrees."""
    async with metered_site(a=limits) as site:
        replies = []
        while not replies or replies[-1].status_code == 200:
            replies = await asyncio.gather(*(site.ask(max_tokens=20) for _ in range(32)))
        refused = next(reply for reply in replies if reply.status_code == 429)
        error_of(refused, 429, "rate_limit_exceeded")
        unit = next(iter(limits)).split("_", maxsplit=1)[0]
        reset = refused.headers[f"x-ratelimit-reset-{unit}"]
        minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(\d+)s", reset).groups()
        assert int(refused.headers["retry-after"]) <= 60 * int(minutes or 0) + int(seconds)
        await site.settled()
        await asyncio.sleep(int(refused.headers["retry-after"]))
        assert (await site.ask(max_tokens=20)).status_code == 200


async def test_a_spent_budget_is_an_insufficient_quota_and_caps_the_last_answer() -> None:
    """Prompt of 5 at 1 micro-dollar, output at 2: 60 micro-dollars pay for 27 tokens."""
    async with metered_site(a={"daily_budget": 60e-6}) as site:
        answer = (await site.ask(max_tokens=100)).json()
        assert answer["usage"]["completion_tokens"] == 27
        assert answer["choices"][0]["finish_reason"] == "length"
        await site.settled()
        reply = await site.ask(max_tokens=1)
        error = error_of(reply, 429, "insufficient_quota")
        assert error["type"] == "insufficient_quota"
        assert int(reply.headers["retry-after"]) <= 86_400
        assert site.spent() == 59


async def test_a_spent_budget_is_there_again_when_its_window_is_over() -> None:
    """R40: who is told of midnight and comes then is served."""
    clock = Clock()
    clock.now = 86_400.0 - 1.5
    async with metered_site(a={"daily_budget": 45e-6}, wall=clock) as site:
        assert (await site.ask()).status_code == 200
        await site.settled()
        reply = await site.ask()
        error_of(reply, 429, "insufficient_quota")
        assert reply.headers["retry-after"] == "2"
        clock.now += 2
        await asyncio.sleep(SPENT_S)  # early refusals know their own clock
        assert (await site.ask()).status_code == 200


async def test_too_much_waiting_of_everybody_is_an_overload() -> None:
    """No tenant is over a limit of its own, and what is refused costs nothing."""
    one = {"max_concurrency": 1, "requests_per_minute": 10}
    async with metered_site(step_s=0.002, policy=FairPolicy(max_waiting=1), a=one, b=one) as site:
        running = [await occupy(site), asyncio.create_task(site.ask(max_tokens=1))]
        await until(lambda: site.admission.router.snapshot().queued == 1)
        refused = await site.ask("b")
        error_of(refused, 503, "overloaded")
        assert refused.headers["x-ratelimit-remaining-requests"] == "10"
        assert {(await task).status_code for task in running} == {200}


async def test_who_waits_too_long_gets_a_504() -> None:
    limits = {"max_concurrency": 1, "max_wait_s": 0.3}
    async with metered_site(step_s=0.002, a=limits) as site:
        first = await occupy(site)
        error_of(await site.ask(), 504, "deadline_exceeded")
        assert (await first).status_code == 200
        await site.settled()
        assert (await site.ask()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_tells_what_remains(stream: bool) -> None:
    async with metered_site(a=METERED) as site, site.http(key_of("a")) as client:
        good = await site.ask(stream=stream)
        bad = await site.ask(stream=stream, temperature=9)
        wrong = await site.ask(model="other")
        nowhere = await client.get("/nowhere")
        models = await client.get("/v1/models")
        replies = [good, bad, wrong, nowhere, models]
        assert [reply.status_code for reply in replies] == [200, 400, 404, 404, 200]
        assert all(name in reply.headers for reply in replies for name in HEADERS)
        assert good.headers["x-ratelimit-limit-requests"] == "100"
        assert good.headers["x-ratelimit-remaining-requests"] == "99"


async def test_a_tenant_has_its_own_context_and_models() -> None:
    tenants = {"short": {"max_context": 10}, "other": {"models": ["else"]}, "a": {}}
    async with metered_site(**tenants) as site:
        long = await site.ask("short", prompt="x" * 10)
        assert long.json()["error"]["code"] == "context_length_exceeded"
        assert (await site.ask("short", max_tokens=50)).json()["usage"]["total_tokens"] == 10
        hidden, missing = await site.ask("other"), await site.ask("a", model="nothing")
        assert hidden.status_code == 404
        assert hidden.json() == missing.json()


async def test_a_priority_orders_what_a_tenant_has_waiting() -> None:
    """A lower one goes first; each choice of a request has the request's own."""
    async with metered_site(a={"max_concurrency": 1}) as site:
        running = await occupy(site)
        order: list[int] = []

        async def ask(priority: int) -> None:
            reply = await site.ask(priority=priority, n=2, stream=True)
            assert reply.status_code == 200
            order.append(priority)

        asking = []
        for number, priority in enumerate((7, 0, -7), start=1):
            asking.append(asyncio.create_task(ask(priority)))
            await until(lambda count=2 * number: site.admission.router.snapshot().queued == count)
        await asyncio.gather(running, *asking)
        assert order == [-7, 0, 7]


async def test_without_a_key_only_the_anonymous_tenant_is_served() -> None:
    body = {"model": "text", "prompt": "hello", "max_tokens": 1}
    for limits, status in (({"anonymous": True}, 200), ({}, 401)):
        async with metered_site(guest=limits | METERED) as site, site.http(None) as client:
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == status
            assert ("x-ratelimit-limit-tokens" in reply.headers) == (status == 200)
            wrong = {"Authorization": "Bearer wrong"}
            assert (await client.get("/v1/models", headers=wrong)).status_code == 401
            empty = {"Authorization": ""}
            assert (await client.get("/v1/models", headers=empty)).status_code == 401


async def test_a_flood_does_not_keep_a_newcomer_waiting() -> None:
    """C46: two tenants, one with 50 long requests: the other's first token does not wait."""
    many = {"max_concurrency": 100, "max_queued": 100}
    async with metered_site(step_s=0.002, hog=many, small={}) as site:
        hogs = [asyncio.create_task(site.ask("hog", max_tokens=100)) for _ in range(50)]
        await until(lambda: len(site.transport.engines["r"].running) == 8)
        reply = await site.ask("small", max_tokens=1)
        assert reply.status_code == 200
        assert sum(task.done() for task in hogs) <= 16
        assert {(await task).status_code for task in hogs} == {200}


@pytest.mark.parametrize(
    ("asked", "param"),
    [({"n": 6}, "n"), ({"prompt": ["x"] * 6}, "prompt"), ({"prompt": ["x"] * 3, "n": 2}, "prompt")],
)
async def test_what_never_finds_places_is_not_to_be_tried_again(
    asked: dict[str, Any], param: str
) -> None:
    """A 429 would be, by every client."""
    async with metered_site(a={"max_concurrency": 2, "max_queued": 3}) as site:
        reply = await site.ask(**asked)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
        assert "5 that may run and wait" in reply.json()["error"]["message"]
        assert "retry-after" not in reply.headers
        assert (await site.ask(n=5, max_tokens=1)).status_code == 200


async def test_what_the_whole_budget_does_not_pay_for_is_not_to_be_tried_again() -> None:
    limits = {"daily_budget": 10e-6, "models": ["text"]}
    async with metered_site(a=limits, b=limits | {"daily_budget": 0.0}) as site:
        reply = await site.ask(prompt="hello, hello", max_tokens=1)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "budget_too_small"
        assert "whole budget of a day (0.00001 dollars)" in reply.json()["error"]["message"]
        assert "retry-after" not in reply.headers
        assert (await site.ask(max_tokens=1)).status_code == 200
        error_of(await site.ask("b", max_tokens=1), 429, "insufficient_quota")

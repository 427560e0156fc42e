from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from starlette.types import Message

from router.messages import Refusal, RefusalKind
from router.policy import FairPolicy
from router.quota import FULL_S, SPENT_S
from serve_app.http.api import create_app
from serve_app.throttling.early_refusals import ANSWER_S, STALE_S, EarlyRefusals
from tests.router.world import Clock
from tests.serve_app.conftest import ACME, KEY, LIMITS
from tests.serve_app.metered_site import MeteredSite, metered_site, until

FULL = Refusal("r", "It is full.", 5.0, RefusalKind.RATE, closed_s=0.25)


def test_what_was_said_is_repeated_for_a_moment_and_then_one_asks_anew() -> None:
    clock = Clock()
    early_refusals = EarlyRefusals(clock)
    assert early_refusals.refused("a") is None
    early_refusals.answer("a", FULL)
    clock.now += 0.2
    told = early_refusals.refused("a")
    assert told is not None
    assert (told.reason, told.kind) == ("It is full.", RefusalKind.RATE)
    assert told.retry_after_s == pytest.approx(4.8)
    assert early_refusals.refused("b") is None
    clock.now += 0.1
    assert early_refusals.refused("a") is None
    assert early_refusals.refused("a") is not None
    clock.now += ANSWER_S  # the one that asked never got to Admission
    assert early_refusals.refused("a") is None


@pytest.mark.parametrize("told", [None, Refusal("r", "Too large.", 5.0)])
def test_the_door_opens_when_one_is_let_in_or_others_may_be(told: Refusal | None) -> None:
    early_refusals = EarlyRefusals(Clock())
    early_refusals.answer("a", FULL)
    early_refusals.answer("a", told)
    assert [early_refusals.refused("a") for _ in range(3)] == [None] * 3


def test_one_may_ask_as_soon_as_something_has_moved() -> None:
    early_refusals = EarlyRefusals(Clock())
    early_refusals.answer("a", FULL)
    early_refusals.moved("a")
    assert early_refusals.refused("a") is None
    assert early_refusals.refused("a") is not None


def test_who_comes_long_afterwards_is_let_in_however_many_come_at_once() -> None:
    clock = Clock()
    early_refusals = EarlyRefusals(clock)
    early_refusals.answer("a", FULL)
    clock.now += FULL.closed_s + STALE_S
    assert [early_refusals.refused("a") for _ in range(40)] == [None] * 40


class Asked:
    """How many requests got to Admission's client."""

    def __init__(self, site: MeteredSite) -> None:
        self.count, self._acquire = 0, site.client.acquire
        site.client.acquire = self._counted  # type: ignore[method-assign]

    async def _counted(self, request: Any) -> Any:
        self.count += 1
        return await self._acquire(request)


TIGHT = {
    "rate": {"requests_per_minute": 1},
    "tokens": {"tokens_per_minute": 1},
    "budget": {"daily_budget": 10e-6, "models": ["text"]},
    "queue": {"max_concurrency": 1, "max_queued": 0},
}


@pytest.mark.parametrize("limits", TIGHT.values(), ids=TIGHT)
async def test_a_flood_over_a_limit_is_turned_away_before_it_is_read(
    limits: dict[str, Any],
) -> None:
    async with metered_site(step_s=0.002, a=limits, b={}) as site:
        running = asyncio.create_task(site.ask(max_tokens=900 if "max_queued" in limits else 5))
        if "max_queued" in limits:
            await until(lambda: site.transport.engines["r"].running)
        else:
            await running
            await site.settled()
        asked, started, statuses = Asked(site), time.monotonic(), []

        async def flood() -> None:
            for _ in range(12):
                reply = await site.ask(max_tokens=5)
                assert int(reply.headers["retry-after"]) >= 1
                statuses.append(reply.status_code)

        await asyncio.gather(*(flood() for _ in range(8)))
        assert set(statuses) == {429}
        # The first of each, and those that ask anew.
        assert asked.count <= 8 + (time.monotonic() - started) / FULL_S + 2
        assert (await site.ask("b", max_tokens=1)).status_code == 200
        running.cancel()


async def test_a_place_that_becomes_free_is_taken_at_once() -> None:
    """What was said when it was taken holds no longer."""
    async with metered_site(a={"max_concurrency": 1, "max_queued": 0}) as site:
        for _ in range(3):
            running = asyncio.create_task(site.ask(max_tokens=200))
            await until(lambda: site.transport.engines["r"].running)
            assert (await site.ask(max_tokens=1)).status_code == 429
            assert (await running).status_code == 200
            await site.settled()
            assert (await site.ask(max_tokens=1)).status_code == 200
            await site.settled()


async def test_a_limit_that_one_request_is_too_large_for_turns_no_other_away() -> None:
    async with metered_site(a={"tokens_per_minute": 100}) as site:
        assert (await site.ask(max_tokens=20)).status_code == 200
        await site.settled()
        assert (await site.ask(max_tokens=90)).status_code == 429
        assert (await site.ask(max_tokens=5)).status_code == 200


async def test_an_overload_of_everybody_turns_away_at_the_door() -> None:
    one = {"max_concurrency": 1}
    async with metered_site(step_s=0.002, policy=FairPolicy(max_waiting=1), a=one, b=one) as site:
        tasks = [asyncio.create_task(site.ask(max_tokens=400)) for _ in range(2)]
        await until(lambda: site.admission.router.snapshot().queued == 1)
        assert (await site.ask("b")).status_code == 503
        refused = site.client.early_refusals.refused("b")
        assert refused is not None
        assert refused.kind is RefusalKind.OVERLOAD
        assert {(await task).status_code for task in tasks} == {200}
        await asyncio.sleep(SPENT_S)
        assert (await site.ask("b")).status_code == 200


async def test_two_thousand_are_turned_away_in_a_second_of_processor_time() -> None:
    """Of the whole application; it takes a fifth of that. So few that none has to wait
    (`Tarpit`): a wait wakes the loop, too."""
    early_refusals, told = EarlyRefusals(), []
    early_refusals.answer("acme", Refusal("r", "It is full.", 5.0, closed_s=1e9))
    app = create_app([], ACME.find_by_key, LIMITS, refused=early_refusals.refused)
    path, headers = "/v1/chat/completions", [(b"authorization", f"Bearer {KEY}".encode())]

    async def receive() -> Message:
        raise AssertionError("the body is read")

    async def send(message: Message) -> None:
        told.append(message.get("status"))

    async def refuse() -> None:
        scope = {"type": "http", "method": "POST", "path": path, "headers": [*headers]}
        await app(scope, receive, send)

    await refuse()
    started = time.process_time()
    for _ in range(40):
        await refuse()
    assert time.process_time() - started < 40 / 2000
    assert told[::2] == [429] * 41

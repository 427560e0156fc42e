"""What answers cost, however they are read and however they end."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from replica.messages import Output
from router.messages import Outcome
from router.tenant import Tenant
from serve_app.fleet.mailbox import Mailbox
from tests.serve_app.metered_site import key_of, metered_site, occupy, until
from tests.serve_app.scripted_engine import STEP_GPU_S, token
from tests.serve_app.sse import events


def until_stop(answer: str, choice: int) -> int:
    """Tokens of a scripted answer up to the one that completes "AB": they count up."""
    first = token(f"{answer}-{choice}", 0)
    return (ord("B") - first) % 200 + 1 + (200 if first == ord("B") else 0)


async def usage_of(reply: httpx.Response) -> tuple[str, dict[str, Any]]:
    """Id and usage of an answer, streamed or not."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        last = events(reply.text)[-2]
        return last["id"], last["usage"]
    return reply.json()["id"], reply.json()["usage"]


async def test_a_prompt_that_is_only_scored_pays_for_itself() -> None:
    """One token is computed for it, which usage does not tell: so it costs nothing."""
    async with metered_site(a={"daily_budget": 1.0}) as site:
        reply = await site.ask(echo=True, max_tokens=0, ignore_eos=False)
        assert reply.json()["usage"]["completion_tokens"] == 0
        await site.settled()
        booked = site.admission.router.snapshot().usage["a"]
        assert (booked.prompt_tokens, booked.output_tokens, site.spent()) == (5, 0, 5)
        assert booked.outcomes[Outcome.SUCCEEDED] == 1


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"best_of": 3},
        {"logprobs": 0},
        {"stream": True, "stream_options": {"include_usage": True}, "n": 2},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"include_stop_str_in_output": True},
    ],
    ids=str,
)
async def test_what_an_answer_costs_does_not_depend_on_when_it_is_read(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], paused: bool
) -> None:
    """The engine goes on behind a stop string until it is told: nobody pays for that."""
    get = Mailbox.get

    async with metered_site(a={"tokens_per_minute": 100_000, "daily_budget": 1.0}) as site:

        async def get_late(mailbox: Mailbox) -> Output:
            """When the engine has computed all that it may."""
            await until(lambda: mailbox.offset == mailbox.submit.sampling.max_tokens)
            return await get(mailbox)

        if paused:
            monkeypatch.setattr(Mailbox, "get", get_late)
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        body = {"prompt": "hello"} if path == "/v1/completions" else {}
        body |= {"model": "text", "max_tokens": 250, "stop": ["AB"], **fields}
        headers = {"Authorization": f"Bearer {key_of('a')}"}
        reply = await site.calls.post(path, json=body, headers=headers)
        answer, usage = await usage_of(reply)
        choices = max(fields.get("n", 1), fields.get("best_of", 1))
        counts = [until_stop(answer, choice) for choice in range(choices)]
        assert usage["completion_tokens"] == sum(counts)
        await site.settled()

        booked = site.admission.router.snapshot().usage["a"]
        assert booked.output_tokens == sum(counts)
        assert booked.micro_dollars == site.spent() == choices * 5 + 2 * sum(counts)
        [*entries] = site.admission.router.take_journal().entries
        assert sorted(entry.used.output for entry in entries) == sorted(counts)
        rates = site.client.rate_limits(Tenant(id="a", tokens_per_minute=100_000)).tokens
        assert rates is not None
        assert 0 <= rates.remaining - (100_000 - choices * 5 - sum(counts)) < 100_000 / 60
        if paused:
            assert booked.gpu_s == STEP_GPU_S * 250 * choices, "the GPU's own time is what it is"


@pytest.mark.parametrize(
    ("fields", "produced"),
    [
        ({}, 20),
        ({"stream": True}, 20),
        ({"stream": True, "stream_options": {"include_usage": True}}, 20),
    ],
)
async def test_streams_and_plain_answers_cost_the_same(fields: dict, produced: int) -> None:
    """C50"""
    async with metered_site(a={"daily_budget": 1.0}) as site:
        assert (await site.ask(**fields)).status_code == 200
        await site.settled()
        assert site.spent() == 5 + 2 * produced


async def test_a_cut_stream_costs_what_was_generated() -> None:
    """C50: the prompt and the tokens that the engine had made when it was stopped."""
    async with metered_site(step_s=0.01, a={"daily_budget": 1.0}) as site:
        body = {"model": "text", "prompt": "hello", "max_tokens": 500, "stream": True}
        async with (
            site.http(key_of("a")) as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            async for _ in reply.aiter_lines():
                break
        await site.settled()
        usage = site.admission.router.snapshot().usage["a"]
        assert usage.outcomes[Outcome.CANCELLED] == 1
        assert 1 <= usage.output_tokens < 100
        assert site.spent() == 5 + 2 * usage.output_tokens
        assert site.admission.router.snapshot().tenants["a"].held_micro_dollars == 0


async def test_five_cut_streams_are_five_cancelled_requests() -> None:
    """C59, R49: each in exactly one class, and the totals agree."""
    async with metered_site(step_s=0.01, a={}) as site:

        async def cut() -> None:
            body = {"model": "text", "prompt": "hello", "max_tokens": 900, "stream": True}
            async with (
                site.http(key_of("a")) as client,
                client.stream("POST", "/v1/completions", json=body) as reply,
            ):
                async for _ in reply.aiter_lines():
                    break

        await asyncio.gather(*(cut() for _ in range(5)))
        assert (await site.ask(n=2)).status_code == 200
        await site.settled()
        usage = site.admission.router.snapshot().usage["a"]
        assert usage.outcomes[Outcome.CANCELLED] == 5
        assert usage.outcomes[Outcome.SUCCEEDED] == 2
        journal = site.admission.router.take_journal().entries
        assert sum(entry.used.output for entry in journal) == usage.output_tokens
        assert site.admission.router.snapshot().tenants["a"].running == 0


async def test_an_engine_that_fails_costs_what_it_generated() -> None:
    """C50: the rule for errors."""
    async with metered_site(step_s=0.01, a={"daily_budget": 1.0}) as site:
        running = await occupy(site)
        engine = site.transport.engines["r"]
        await asyncio.sleep(0.1)
        [(request_id, _)] = engine.running
        engine.give_up(request_id, "out of luck")
        assert (await running).status_code == 500
        await site.settled()
        usage = site.admission.router.snapshot().usage["a"]
        assert usage.outcomes[Outcome.FAILED] == 1
        assert site.spent() == 5 + 2 * usage.output_tokens > 5

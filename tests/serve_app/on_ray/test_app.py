from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from router.messages import Outcome
from router.tenant import digest
from tests.oracle import Oracle
from tests.serve_app.on_ray.site import (
    KEY,
    MODEL,
    PAGE,
    TOKENS,
    Site,
    actors,
    complete,
    engines,
    kill,
    long_stream,
    stream,
    until,
)

PROMPTS = [f"Tell me about number {index}." for index in range(12)]


@pytest.fixture(scope="session")
def expected(model: str) -> dict[str, str]:
    """The answers of the reference, by prompt; without the end of the sequence."""
    oracle = Oracle(model, TOKENS)
    answers = {}
    for prompt in PROMPTS:
        ids = oracle.greedy(tuple(prompt.encode()), TOKENS)
        answers[prompt] = bytes(i for i in ids if i < 256).decode(errors="replace")
    return answers


async def runs(site: Site, sequences: int) -> bool:
    return await site.running() == sequences


async def succeeded(site: Site) -> int:
    return (await site.snapshot()).usage["acme"].outcomes[Outcome.SUCCEEDED]


async def only_one(deployment: str) -> bool:
    return len(actors(deployment)) == 1 and (deployment != "Replica" or len(engines()) == 1)


async def test_answers_equal_the_reference_streamed_or_not(
    site: Site, expected: dict[str, str]
) -> None:
    async with site.openai() as client:
        plain = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
        streamed = await asyncio.gather(*(stream(client, prompt) for prompt in PROMPTS))
    assert dict(zip(PROMPTS, plain, strict=True)) == expected
    assert streamed == plain


async def test_structure_penalties_and_log_probabilities_pass_through_all_of_it(
    site: Site, model: str
) -> None:
    """From the engine's own process to the client, streamed or not."""
    reference = Oracle(model, TOKENS)
    prompt = "Tell me:"
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 30, "seed": 1}
    async with site.openai() as client:
        form = {"guided_regex": "[a-c]{4}-[0-9]{2}"}
        bound = await client.completions.create(**body, extra_body=form)
        answer = await client.completions.create(
            **body, echo=True, logprobs=3, frequency_penalty=1.5
        )
        told: list[float | None] = []
        async for chunk in await client.completions.create(
            **body, echo=True, logprobs=3, frequency_penalty=1.5, stream=True
        ):
            logprobs = chunk.choices[0].logprobs
            told += (logprobs.token_logprobs or []) if logprobs else []
    assert re.fullmatch("[a-c]{4}-[0-9]{2}", bound.choices[0].text)
    whole = answer.choices[0].logprobs
    assert whole is not None
    assert whole.token_logprobs == told
    ids = torch.tensor([[*prompt.encode()]])
    with torch.inference_mode():
        table = reference.model(ids).logits[0].log_softmax(-1)
    wanted = [float(table[at, token]) for at, token in enumerate(ids[0, 1:].tolist())]
    assert told[0] is None
    assert told[1 : len(prompt)] == pytest.approx(wanted, abs=1e-3)


async def test_web_pages_may_call_and_read(site: Site) -> None:
    """Whatever answers: routes, administrators' routes or what refuses a key."""
    async with site.http() as http:
        http.headers["Origin"] = PAGE
        asked = {"Access-Control-Request-Method": "POST", "Authorization": ""}
        preflight = await http.options("/v1/chat/completions", headers=asked)
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
        answer = await http.post("/v1/completions", json=body)
        streamed = await http.post("/v1/completions", json=body | {"stream": True})
        refused = await http.get("/v1/models", headers={"Authorization": "Bearer nobody"})
        admin = await http.get("/admin/tenants")
    replies = [preflight, answer, streamed, refused, admin]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 401, 401]
    assert {reply.headers["access-control-allow-origin"] for reply in replies} == {PAGE}
    assert "x-ratelimit-remaining-tokens" in answer.headers
    assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"]


async def test_both_replicas_work(site: Site) -> None:
    async with site.openai() as client:
        running = asyncio.gather(*(long_stream(client, prompt, 500) for prompt in PROMPTS[:8]))

        async def all_busy() -> bool:
            replicas = (await site.snapshot()).replicas.values()
            return all(replica.leases for replica in replicas)

        await until(all_busy)
        await running


async def test_clients_that_leave_leave_nothing_behind(site: Site) -> None:
    """C32: streams and plain calls closed at any moment."""

    async def leave(index: int) -> None:
        async with site.http() as client:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 9000, "ignore_eos": True}
            body["stream"] = index % 2 == 0
            call = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.02 * index)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    before = await succeeded(site)
    await asyncio.gather(*(leave(index) for index in range(16)))
    await until(site.at_rest, 5)
    assert await succeeded(site) == before


@pytest.mark.parametrize("part", ["engine", "actor"])
async def test_a_replica_that_is_killed_costs_no_client_anything(site: Site, part: str) -> None:
    """Its streams go on at the other one, and read as if nothing had happened."""
    async with site.openai() as client:
        undisturbed = await asyncio.gather(*(long_stream(client, p, 300) for p in PROMPTS[:8]))
        calls = [asyncio.create_task(long_stream(client, p, 300)) for p in PROMPTS[:8]]
        await until(lambda: runs(site, 8))
        await asyncio.sleep(0.1)
        kill(engines()[0] if part == "engine" else actors("Replica")[0])
        assert await asyncio.gather(*calls) == undisturbed


async def test_service_goes_on_while_admission_restarts(
    site: Site, expected: dict[str, str]
) -> None:
    epoch = (await site.snapshot()).epoch
    async with site.openai() as client:
        running = [asyncio.create_task(long_stream(client, prompt, 1000)) for prompt in PROMPTS[:4]]
        await until(lambda: runs(site, 4))
        kill(actors("Admission")[0])
        assert await complete(client, PROMPTS[0]) == expected[PROMPTS[0]]
        assert len(await asyncio.gather(*running)) == 4
    assert (await site.snapshot()).epoch > epoch


async def test_what_a_dead_ingress_left_behind_is_aborted(site: Site) -> None:
    before = await site.aborted()
    async with site.openai() as client:
        calls = [asyncio.create_task(long_stream(client, p, 12_000)) for p in PROMPTS[:8]]
        await until(lambda: runs(site, 8))
        for pid in actors("Ingress"):
            kill(pid)
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, openai.APIError | httpx.HTTPError) for result in results)
    await until(lambda: runs(site, 0), 20)
    assert await site.aborted() == before + 8


@pytest.mark.parametrize("kind", ["Replica", "Ingress"])
async def test_what_is_removed_finishes_what_it_has(site: Site, kind: str) -> None:
    """C35, C56: scaling down fails no request."""
    async with site.openai() as client:
        calls = [asyncio.create_task(long_stream(client, prompt, 500)) for prompt in PROMPTS[:8]]
        await until(lambda: runs(site, 8))
        shrinking = asyncio.create_task(site.deploy(**{kind: {"num_replicas": 1}}))
        later = [complete(client, prompt) for prompt in PROMPTS]
        assert len(await asyncio.gather(*calls, *later)) == 20
        await shrinking
        await until(lambda: only_one(kind), 30)
        assert await complete(client, "still there?")
    await site.deploy()


async def test_tenants_change_without_a_restart(site: Site, tmp_path: Path) -> None:
    async def status(key: str) -> int:
        async with site.http(key) as client:
            return (await client.get("/v1/models")).status_code

    before = actors("") + engines()
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants: [{{id: acme, keys: ['{digest('new-key')}']}}]")
    user_config = {"tenants": str(file), "revision": 1}
    assert await status("new-key") == 401
    await site.deploy(Admission={"user_config": user_config})
    for _ in range(8):
        assert await status("new-key") == 200
        assert await status(KEY) == 401
    assert actors("") + engines() == before
    await site.deploy()
    assert await status(KEY) == 200


async def test_tenants_that_cannot_be_read_change_nothing(site: Site, tmp_path: Path) -> None:
    user_config = {"tenants": str(tmp_path / "nowhere.yaml"), "revision": 2}
    await site.deploy(Admission={"user_config": user_config})
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as client:
        assert (await client.get(f"{site.url}/v1/models")).status_code == 200
    await site.deploy()


async def test_a_clients_request_id_is_cleaned_before_serve_sees_it(site: Site) -> None:
    """Serve's proxy would send it back, and write it into its log."""
    async with site.http() as http:
        for given, is_kept in (("mine-1", True), ("id GET /admin 200", False), ("x" * 9999, False)):
            reply = await http.get("/health", headers={"X-Request-ID": given})
            [told] = reply.headers.get_list("x-request-id")
            assert (told == given) == is_kept
            assert len(told) < 64

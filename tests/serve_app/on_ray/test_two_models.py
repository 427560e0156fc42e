"""Two models in one application, beside the one with a single model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ray import serve

from router.snapshot import Snapshot
from router.tenant import digest
from tests.models import save_tiny
from tests.oracle import Oracle
from tests.serve_app.on_ray.site import ADMIN_KEY, KEY, Site, kill, processes, until

APP = "two-models"
NARROW_KEY = "key-narrow"
TOKENS = 40
PROMPTS = [f"Which model is this, {number}?" for number in range(4)]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    """Models that answer differently, by name."""
    folders = {name: tmp_path_factory.mktemp("tiny") for name in ("one", "two")}
    context = {"max_position_embeddings": 16384}
    return {
        name: Oracle(save_tiny(folder, seed=seed, **context), TOKENS)
        for seed, (name, folder) in enumerate(folders.items(), start=1)
    }


@pytest.fixture
async def url(site: Site, oracles: dict[str, Oracle], tmp_path: Path) -> AsyncIterator[str]:
    """Of the second application; the first one alone is left behind."""
    args = {
        "models": [_model("one", oracles, aliases=["first"]), _model("two", oracles)],
        "tenants": [
            {"id": "acme", "keys": [digest(KEY)], "max_concurrency": 3, "daily_budget": 1.0},
            {"id": "narrow", "keys": [digest(NARROW_KEY)], "models": ["two"]},
        ],
        "prices": {"one": {"output": 1.0}, "two": {"output": 5.0}},
        "usage": str(tmp_path / "usage.db"),
        "admin_keys": [digest(ADMIN_KEY)],
    }
    url = f"{site.url}/two"
    await site.deploy_beside(_application(args))
    async with _http(url) as client:
        await until(lambda: _answers(client, "/ready", 200), 60)
    yield url
    await site.deploy()


def _model(name: str, oracles: dict[str, Oracle], **options: Any) -> dict[str, Any]:
    engine = {"model": oracles[name].folder, "dtype": "float32", "threads": 1, "max_rows": 4}
    return {"name": name, "engine": engine | {"kv_tokens": 65536}, **options}


def _application(args: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": APP, "route_prefix": "/two", "import_path": "serve_app.app:build", "args": args
    }  # fmt: skip


def _http(url: str, key: str = KEY) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30
    )  # fmt: skip


async def _answers(client: httpx.AsyncClient, path: str, status: int) -> bool:
    return (await client.get(path)).status_code == status


async def _snapshot() -> Snapshot:
    return await serve.get_deployment_handle("Admission", APP).snapshot.remote()


async def test_two_models_answer_for_themselves_and_share_a_tenants_limits(
    url: str, oracles: dict[str, Oracle]
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["one", "first", "two"]
        await _check_answers(client, oracles)
        await _check_concurrency(client)
        await _check_usage(url)
        await _check_what_a_narrow_tenant_sees(url)
        await _check_that_one_serves_while_the_other_is_away(url, client)


async def _check_answers(client: openai.AsyncOpenAI, oracles: dict[str, Oracle]) -> None:
    """Each as its own reference, and the two differ."""
    asked = [(model, prompt) for prompt in PROMPTS for model in ("one", "first", "two")]
    calls = [
        client.completions.create(model=model, prompt=prompt, max_tokens=TOKENS, temperature=0)
        for model, prompt in asked
    ]
    answers = dict(zip(asked, await asyncio.gather(*calls), strict=True))
    for (model, prompt), answer in answers.items():
        name = "one" if model == "first" else model
        ids = oracles[name].greedy(tuple(prompt.encode()), TOKENS)
        expected = bytes(i for i in ids if i < 256).decode(errors="replace")
        assert (answer.model, answer.choices[0].text) == (name, expected)
    assert answers["one", PROMPTS[0]].choices[0].text != answers["two", PROMPTS[0]].choices[0].text


async def _check_concurrency(client: openai.AsyncOpenAI) -> None:
    """Three at once, whichever they are for."""
    long = {"max_tokens": 150, "extra_body": {"ignore_eos": True}}
    calls = [
        asyncio.create_task(client.completions.create(model=model, prompt="x", **long))
        for model in ("one", "two") * 4
    ]
    most: Counter[str] = Counter()
    while not all(call.done() for call in calls):
        state = await _snapshot()
        assert state.tenants["acme"].running <= 3
        for replica in state.replicas.values():
            most[replica.model] = max(most[replica.model], replica.leases)
        await asyncio.sleep(0.01)
    assert [(await call).usage.completion_tokens for call in calls] == [150] * 8
    assert min(most["one"], most["two"]) >= 1


async def _check_usage(url: str) -> None:
    """Each at its own price, and one budget pays for both."""

    async def settled() -> bool:
        state = await _snapshot()
        return not sum(state.ingresses.values())

    await until(settled)
    async with _http(url, ADMIN_KEY) as client:
        rows = (await client.get("/admin/usage")).json()["data"]
    totals: Counter[str] = Counter()
    for row in rows:
        price = {"one": 1, "two": 5}[row["model"]]
        assert round(row["dollars"] * 1e6) == price * row["output_tokens"] > 0
        totals[row["tenant"]] += round(row["dollars"] * 1e6)
    (spent,) = (await _snapshot()).tenants["acme"].spent_micro_dollars.values()
    assert spent == totals["acme"]


async def _check_what_a_narrow_tenant_sees(url: str) -> None:
    async with _http(url, NARROW_KEY) as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["two"]
        for path in ("/v1/completions", "/tokenize"):
            for model, status in (("one", 404), ("first", 404), ("two", 200)):
                reply = await client.post(path, json={"model": model, "prompt": "x"})
                assert reply.status_code == status


async def _check_that_one_serves_while_the_other_is_away(
    url: str, client: openai.AsyncOpenAI
) -> None:
    body = {"prompt": "x", "max_tokens": 5, "temperature": 0}
    for pid in processes(f"ServeReplica:{APP}:Replica-two"):
        kill(pid)
    async with _http(url) as http:
        await until(lambda: _answers(http, "/ready", 503), 20)
        assert (await client.completions.create(model="one", **body)).choices[0].text
        with pytest.raises(openai.InternalServerError, match="not ready"):
            await client.completions.create(model="two", **body)
        await until(lambda: _answers(http, "/ready", 200), 60)
    assert (await client.completions.create(model="two", **body)).choices[0].text

"""Prometheus finds what our rules and dashboards ask for, on a running cluster."""

from __future__ import annotations

import re

import anyio
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from router.tenant import digest
from serve_app import top
from tests.serve_app.collector import attributes, seconds
from tests.serve_app.on_ray.conftest import REPLICAS
from tests.serve_app.on_ray.exported import asked, exported
from tests.serve_app.on_ray.site import ADMIN_KEY, KEY, MODEL, Site, complete, until

NOT_HERE = {"ray_fairstream_preemptions_total", "ray_fairstream_late_kernels_total"}
"""Counts what does not happen here."""


async def test_every_metric_that_is_asked_for_is_exported(site: Site) -> None:
    """Nothing is scaled here."""
    names = {name for name in asked() if not name.startswith("ray_fairstream_scaling_")}
    both = rf'ray_fairstream_replicas{{[^}}]*model="{MODEL}"[^}}]*}} 2'  # one may be new
    found = ""

    async def all_are_there() -> object:
        nonlocal found
        found = await exported()
        return all(f"\n{name}{{" in found for name in names - NOT_HERE) and re.search(both, found)

    async with site.http("wrong") as stranger:
        assert (await stranger.get("/v1/models")).status_code == 401
    async with site.openai() as client, anyio.create_task_group() as group:
        await complete(client, "hello")
        group.start_soon(_ask_on, client)  # queues are told of tenants that have one
        await until(all_are_there, 40)
        group.cancel_scope.cancel()
    assert {
        "ray_fairstream_gpu_seconds_total",
        "ray_fairstream_requests_total",
        "ray_serve_deployment_replica_starts_total",
    } <= names
    assert re.search(r'ray_fairstream_requests_total{[^}]*outcome="succeeded"', found)
    assert re.search(r'ray_fairstream_requests_total{[^}]*tenant="acme"', found)
    starts = r'ray_serve_deployment_replica_starts_total{[^}]*deployment="Replica"'
    assert re.search(starts, found)
    count = r'ray_fairstream_first_token_seconds_bucket{[^}]*le="300[^}]*model="%s"[^}]*} [1-9]'
    assert re.search(count % MODEL, found)
    assert KEY not in found
    assert digest(KEY)[7:] not in found


async def test_one_page_tells_of_all_processes(site: Site) -> None:
    """Whichever ingress answers; to administrators alone."""
    found: list[Sample] = []

    def labels(name: str) -> list[dict[str, str]]:
        return [each.labels for each in found if each.name == name and each.value]

    async def told() -> bool:
        async with site.http(ADMIN_KEY) as client:
            page = await client.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        families = text_string_to_metric_families(page.text)
        found[:] = [sample for family in families for sample in family.samples]
        ingresses = {each["ingress"] for each in labels("fairstream_request_seconds_count")}
        replicas = {each["replica"] for each in labels("fairstream_steps_total")}
        runs = labels("fairstream_requests_running")
        return (len(ingresses), len(replicas), len(runs)) == (2, REPLICAS, 1)

    async with site.openai() as client, anyio.create_task_group() as group:
        for tokens in (2000, 20, 20):  # one runs, whenever somebody looks
            group.start_soon(_ask_on, client, tokens)
        await until(told, 30)
        group.cancel_scope.cancel()
    for key in (KEY, "wrong"):
        async with site.http(key) as http:
            assert (await http.get("/metrics")).status_code == 401
    states = {each["state"] for each in labels("fairstream_gpu_seconds_total")}
    assert {"requests", "spare", "starting"} <= states
    assert {"tenant": "acme", "period": "month"} in labels("fairstream_budget_left_dollars")
    assert {"tenant": "acme", "limit": "tokens"} in labels("fairstream_rate_left")
    engines = labels("vllm:cache_config_info")
    assert [each["model_name"] for each in engines] == [MODEL] * REPLICAS
    assert all(int(each["num_gpu_blocks"]) > 0 for each in engines)


async def test_a_request_is_a_span_in_the_trace_of_its_client(site: Site) -> None:
    """With the phases that Admission and an engine have told."""
    trace, taken = "0af7651916cd43dd8448eb211c80319c", site.collector
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    async with site.openai() as client:
        answer = await client.with_options(default_headers=headers).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=20
        )

    async def has_come() -> bool:
        return any(attributes(span).get("gen_ai.response.id") == answer.id for span in taken.spans)

    await until(has_come, 10)
    [root] = [
        span for span in taken.spans if attributes(span).get("gen_ai.response.id") == answer.id
    ]
    told = attributes(root)
    assert (root.trace_id.hex(), root.name) == (trace, f"chat {MODEL}")
    assert answer.usage is not None
    assert told["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    children = taken.children(root)
    assert [span.name for span in children] == ["admission", "replica_queue", "prefill", "decode"]
    assert all(seconds(span) > 0 for span in children)
    assert sum(map(seconds, children)) <= seconds(root)
    assert taken.resource["service.instance.id"]


async def test_top_shows_the_engines_and_who_asks(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(top.KEY, ADMIN_KEY)
    monkeypatch.setenv("COLUMNS", "240")

    async def all_is_shown() -> bool:
        await anyio.to_thread.run_sync(top.main, [site.url, "--once", "--every", "0.6"])
        text = capsys.readouterr().out
        engines = re.findall(rf"(?m)^ {MODEL} +\w+ +\d+\.\d% .* [1-9]\d* *$", text)
        acme = re.search(r"(?m)^ acme +[1-9] .* tokens.*\$.* a month", text)
        return len(engines) == REPLICAS and acme is not None

    async with site.openai() as client, anyio.create_task_group() as group:
        for tokens in (2000, 20, 20):
            group.start_soon(_ask_on, client, tokens)
        await until(all_is_shown, 30)
        group.cancel_scope.cancel()


async def _ask_on(client: openai.AsyncOpenAI, tokens: int = 2000) -> None:
    while True:
        await complete(client, "hello", tokens)

"""Spans as a collector gets them, over HTTP in OpenTelemetry's own protocol."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from router.tenant import Tenant
from serve_app.telemetry import spans as spans_module
from serve_app.telemetry.breakdown import Phase
from serve_app.telemetry.records import RequestRecord
from serve_app.telemetry.spans import Spans
from tests.ports import free_ports
from tests.serve_app.collector import Collector, attributes, collector, seconds
from tests.serve_app.metered_site import MeteredSite, key_of, metered_site, occupy, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent every five seconds elsewhere."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@contextmanager
def sending(to: str) -> Iterator[Spans]:
    made = Spans(f"{to}/v1/traces", "ingress-1")
    try:
        yield made
    finally:
        made.close()


async def ask(
    site: MeteredSite,
    path: str = "completions",
    headers: dict[str, str] | None = None,
    **body: object,
) -> httpx.Response:
    prompt = (
        {"prompt": "the secret"}
        if path == "completions"
        else {"messages": [{"role": "user", "content": "the secret"}]}
    )
    whole = {"model": "text", "max_tokens": 5, "ignore_eos": True} | prompt | body
    named = {"Authorization": f"Bearer {key_of('a')}"} | (headers or {})
    return await site.calls.post(f"/v1/{path}", json=whole, headers=named)


async def roots(taken: Collector, count: int) -> list[Span]:
    """Once so many have come with their children: a request's own span ends last."""
    found: list[Span] = []

    def are_there() -> bool:
        found[:] = [span for span in taken.spans if span.kind == Span.SPAN_KIND_SERVER]
        return len(found) >= count

    await until(are_there)
    await asyncio.sleep(0.05)
    assert len(found) == count
    return found


async def test_a_request_is_a_span_with_one_for_each_phase() -> None:
    with collector() as taken, sending(taken.url) as spans:
        async with metered_site(observe=spans.note, step_s=0.02, a={}) as site:
            site.transport.engines["r"].queued_s = 0.01
            reply = await ask(site, headers={"X-Request-ID": "mine-1"})
            [root] = await roots(taken, 1)
    assert root.name == "text_completion text"
    assert not root.parent_span_id
    assert root.status.code == Status.STATUS_CODE_UNSET
    told = attributes(root)
    phases = {
        name.removeprefix("fairstream.phase."): told.pop(name)
        for name in list(told)
        if name.startswith("fairstream.phase.")
    }
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "fairstream",
        "gen_ai.request.model": "text",
        "gen_ai.response.model": "text",
        "gen_ai.response.id": reply.json()["id"],
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "fairstream.tenant": "a",
        "fairstream.outcome": "succeeded",
        "fairstream.request_id": "mine-1",
    }
    assert sum(phases.values()) == pytest.approx(seconds(root), abs=1e-5)
    children = taken.children(root)
    assert [span.name for span in children] == ["admission", "replica_queue", "prefill", "decode"]
    assert {span.trace_id for span in children} == {root.trace_id}
    for span, later in zip(children, [*children[1:], root], strict=True):
        end = later.start_time_unix_nano if later is not root else root.end_time_unix_nano
        assert abs(span.end_time_unix_nano - end) < 2000  # of seconds in floats, whatever day it is
    assert seconds(children[1]) == pytest.approx(0.01, abs=1e-5)
    assert seconds(children[3]) >= phases["decode"] >= 0.06
    held_back = attributes(children[0])
    assert sum(held_back.values()) == pytest.approx(seconds(children[0]), abs=1e-4)
    assert attributes(children[2]) == {"fairstream.replicas": ["r"]}
    assert abs(root.end_time_unix_nano / 1e9 - time.time()) < 10
    assert taken.resource["service.name"] == "fairstream"
    assert taken.resource["service.instance.id"] == "ingress-1"
    assert "secret" not in str(taken.spans)


async def test_tokens_are_those_that_the_client_is_told() -> None:
    """Each prompt once; of streams, and of text behind a stop string."""
    with collector() as taken, sending(taken.url) as spans:
        async with metered_site(observe=spans.note, a={}) as site:
            bodies: list[dict[str, object]] = [{"n": 2}, {"prompt": ["x", "yy"], "n": 3}]
            usages = [(await ask(site, **body)).json()["usage"] for body in bodies]
            await ask(site, stream=True, n=2)
            found = [attributes(root) for root in await roots(taken, 3)]
    for told, usage in zip(found, usages, strict=False):
        assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert [told["gen_ai.request.choice.count"] for told in found] == [2, 3, 2]
    assert [told.get("gen_ai.request.stream") for told in found] == [None, None, True]
    assert found[2]["gen_ai.usage.output_tokens"] == 10


async def test_the_clients_trace_goes_on() -> None:
    with collector() as taken, sending(taken.url) as spans:
        async with metered_site(observe=spans.note, a={}) as site:
            sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}
            await ask(site, headers=sampled)
            [root] = await roots(taken, 1)
            await ask(site, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})  # not sampled
            for nonsense in ("", "00-0-0-01", "x" * 600, f"00-{'0' * 32}-{PARENT}-01"):
                await ask(site, headers={"traceparent": nonsense, "tracestate": "y" * 60_000})
            found = await roots(taken, 5)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert root.trace_state == "vendor=x"
    assert {span.trace_id for span in taken.children(root)} == {root.trace_id}
    assert [span for span in found if span.trace_id.hex() == TRACE] == [root]
    assert not any(span.trace_state for span in taken.spans if span.trace_id != root.trace_id)


async def test_what_was_refused_has_a_span_and_a_stranger_none() -> None:
    with collector() as taken, sending(taken.url) as spans:
        async with metered_site(observe=spans.note, a={"requests_per_minute": 1}) as site:
            await ask(site)
            assert (await ask(site, path="chat/completions")).status_code == 429
            assert (await ask(site, headers={"Authorization": "Bearer no"})).status_code == 401
            await site.calls.get("/v1/models", headers={"Authorization": f"Bearer {key_of('a')}"})
            _, refused = await roots(taken, 2)
    told = attributes(refused)
    assert refused.name.split()[0] == told["gen_ai.operation.name"] == "chat"
    assert (told["error.type"], told["http.response.status_code"]) == ("rate_limit_exceeded", 429)
    assert refused.status.code == Status.STATUS_CODE_UNSET  # the client's fault, by the convention
    assert [child.name for child in taken.children(refused)] == ["admission"]


async def test_what_fails_is_an_error() -> None:
    with collector() as taken, sending(taken.url) as spans:
        async with metered_site(observe=spans.note, a={}) as site:
            asking = await occupy(site)
            site.streams.fail(RuntimeError("nobody's plan"))
            assert (await asking).status_code == 500
            [root] = await roots(taken, 1)
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert attributes(root)["error.type"] == "server_error"


def record() -> RequestRecord:
    scope = {"method": "POST", "path": "/v1/completions", "state": {"tenant": Tenant(id="a")}}
    made = RequestRecord(scope, "r", "cmpl-1", "m", status=200, complete=True)
    with made.sequence(prompt_tokens=1) as sequence:
        sequence.reach(Phase.PREFILL)
        sequence.answer(0.0)
    made.breakdown.count()
    return made


@pytest.mark.parametrize("away", [True, False])
async def test_a_collector_that_is_down_or_slow_harms_no_request(
    away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded, nobody waits, and the end of the process does not take long."""
    monkeypatch.setattr(spans_module, "LEAVE_S", 0.2)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "50")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "20")
    with collector(delay_s=1.0) as taken:
        spans = Spans(
            f"http://127.0.0.1:{free_ports(1)[0]}" if away else f"{taken.url}/v1/traces", "i"
        )
        longest, ended = 0.0, record()
        for _ in range(300):
            began = time.perf_counter()
            spans.note(ended)
            longest = max(longest, time.perf_counter() - began)
            await asyncio.sleep(0)
        [processor] = spans._provider._active_span_processor._span_processors
        assert len(processor._batch_processor._queue) <= 50  # type: ignore[attr-defined]
        async with metered_site(observe=spans.note, a={}) as site:
            replies = await asyncio.gather(*(ask(site) for _ in range(20)))
            assert {reply.status_code for reply in replies} == {200}
        began = time.perf_counter()
        spans.close()
        assert time.perf_counter() - began < 0.7
    assert longest < 0.5  # the collector takes 1 s


def test_opentelemetry_is_not_imported_where_nobody_wants_spans() -> None:
    """It may not even be installed."""
    code = (
        "import sys, serve_app.telemetry.spans; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_name_that_variables_give_the_service_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=ours,deployment.environment=prod")
    with collector() as taken, sending(taken.url) as spans:
        spans.note(record())
        spans._provider.force_flush()
    assert taken.resource["service.name"] == "ours"
    assert taken.resource["deployment.environment"] == "prod"

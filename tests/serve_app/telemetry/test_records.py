"""What the log and the counters keep of requests, over real HTTP and a real router."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve_app.telemetry import records
from tests.serve_app.metered_site import ADMIN_KEY, MeteredSite, key_of, metered_site, until

Lines = list[dict[str, Any]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """Message, level and fields of each record, in order."""
    found: Lines = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == "serve_app.telemetry.records":
                line = {"message": record.getMessage(), "level": record.levelname}
                found.append(line | records.context() | record.fields)  # type: ignore[attr-defined]

    logger, handler = logging.getLogger("serve_app"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_a_request_that_is_served_leaves_one_line(lines: Lines) -> None:
    async with metered_site(a={}) as site:
        reply = await site.ask(n=2, stop=["nowhere"])
        [line] = lines
        seconds, phases = line.pop("seconds"), line.pop("phases")
        held_back = line.pop("held_back")
        assert sum(held_back.values()) == pytest.approx(phases["admission"], abs=0.001)
        assert sum(phases.values()) == pytest.approx(seconds, abs=0.001)
        assert 0 <= line.pop("queued_s") < 5
        assert re.fullmatch("[0-9a-f]{32}", line.pop("request_id"))
        assert line == {
            "message": "POST /v1/completions",
            "level": "INFO",
            "tenant": "a",
            "status": 200,
            "outcome": "succeeded",
            "model": "text",
            "answer_id": reply.json()["id"],
            "sequences": 2,
            "replicas": ["r"],
            "prompt_tokens": 10,
            "cached_tokens": 0,
            "output_tokens": 40,
        }
        assert not site.refusals


async def test_the_wait_for_a_place_is_told(lines: Lines) -> None:
    async with metered_site(a={"max_concurrency": 1}) as site:
        first = asyncio.create_task(site.ask(max_tokens=300))
        await until(lambda: site.transport.engines["r"].running)
        await asyncio.gather(first, site.ask())
    quick, slow = sorted(line["queued_s"] for line in lines)
    assert quick < 0.1 < slow


async def test_who_hangs_up_is_cancelled(lines: Lines) -> None:
    async with metered_site(a={}) as site:
        for stream in (True, False):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(site.ask(stream=stream, max_tokens=2000), 0.3)
        await until(lambda: len(lines) == 2)
        await site.settled()
    assert [line["outcome"] for line in lines] == ["cancelled", "cancelled"]
    assert all(line["output_tokens"] > 0 for line in lines)


async def test_a_stream_that_breaks_has_failed(lines: Lines) -> None:
    async with metered_site(a={}) as site:
        asking = asyncio.create_task(site.ask(stream=True, max_tokens=900))
        await until(lambda: site.transport.engines["r"].running)
        await asyncio.sleep(0.1)
        site.streams.fail(RuntimeError("nobody's plan"))
        assert (await asking).status_code == 200
    [line] = lines
    assert (line["level"], line["outcome"]) == ("WARNING", "failed")
    assert (line["status"], line["reason"]) == (200, "server_error")


async def refusals_of(site: MeteredSite) -> list[tuple[str, str]]:
    """Asks for what is refused, in each way that there is. Returns tenants and reasons."""
    await site.ask("b")
    await site.ask("b")  # one a minute
    await site.ask("broke")
    await site.ask("a", n=1000)
    await site.ask("a", max_tokens="many")
    await site.ask("a", model="other")
    await site.ask("a", prompt="x" * 100_000)
    await site.ask("a", guided_regex="(")
    await site.ask("nobody")
    a = {"Authorization": f"Bearer {key_of('a')}"}
    await site.calls.get("/v1/nowhere", headers=a)
    await site.calls.get("/v1/completions", headers=a)
    await site.calls.post("/v1/completions", headers=a, content=b"{}")
    await site.calls.get("/v1/models")
    await site.calls.get("/admin/tenants", headers=a)
    return [
        ("b", "rate_limit_exceeded"),
        ("broke", "insufficient_quota"),
        *[("a", "http_400")] * 2,
        ("a", "model_not_found"),
        ("a", "context_length_exceeded"),
        ("a", "http_400"),
        ("", "invalid_api_key"),
        ("a", "http_404"),
        ("a", "http_405"),
        ("a", "http_415"),
        *[("", "invalid_api_key")] * 2,
    ]


TENANTS: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"requests_per_minute": 1},
    "broke": {"daily_budget": 0.0},
}


async def test_whatever_is_refused_leaves_a_line_and_is_counted(lines: Lines) -> None:
    async with metered_site(**TENANTS) as site:
        expected = await refusals_of(site)
        assert site.refusals == Counter(expected)
    refused = [line for line in lines if line["outcome"] == "refused"]
    assert [(line["tenant"], line["reason"]) for line in refused] == expected
    assert all(line["error"] and line["request_id"] for line in refused)
    assert {line["client"] for line in refused if not line["tenant"]} == {"127.0.0.1"}
    assert next(line for line in refused if line["reason"] == "http_400")["param"] == "n"


async def test_reasons_are_few_whatever_clients_write() -> None:
    """Each is a time series."""
    async with metered_site(a={}) as site:
        for number in range(10):
            await site.ask("a", **{f"field-{number}": {}, "logit_bias": {f"x{number}": 1}})
            await site.calls.get(f"/{number}", headers={"Authorization": f"Bearer {key_of('a')}"})
        assert set(site.refusals) == {("a", "http_400"), ("a", "http_404")}
        assert site.refusals.total() == 20


@pytest.mark.parametrize(
    "given", ["a" * 60_000, 'x" status=200\t{"level": "INFO"}', "ü", ""], ids=str.__len__
)
async def test_a_request_id_is_the_clients_only_if_short_and_plain(
    given: str, lines: Lines
) -> None:
    async with metered_site(a={}) as site:
        headers = httpx.Headers([(b"X-Request-ID", given.encode()), (b"Authorization", b"none")])
        await site.calls.get("/version", headers=headers)
        await site.calls.get("/version", headers={"X-Request-ID": "mine-1"})
    assert re.fullmatch("[0-9a-f]{32}", lines[0]["request_id"])
    assert lines[1]["request_id"] == "mine-1"


async def test_a_flood_of_refusals_leaves_room_for_the_others(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for what is served of the same tenant; all of it is counted."""
    monkeypatch.setattr(records, "LINES_PER_MINUTE", 12)
    async with metered_site(a={}, b={}) as site:
        a = {"Authorization": f"Bearer {key_of('a')}"}
        for _ in range(30):
            await site.calls.get("/nowhere", headers=a)
        assert (await site.ask("a")).status_code == (await site.ask("b")).status_code == 200
        assert site.refusals["a", "http_404"] == 30
        monkeypatch.setattr(records.Bucket, "level", lambda bucket, now: 1.0)
        await site.calls.get("/nowhere", headers=a)
    told = Counter((line["tenant"], line["outcome"]) for line in lines)
    left_out = sum(line.get("left_out", 0) for line in lines)
    assert told["a", "refused"] + left_out == 31
    assert left_out > 10
    assert told["a", "succeeded"] == told["b", "succeeded"] == 1


async def test_probes_leave_no_lines(lines: Lines) -> None:
    async with metered_site(a={}) as site:
        for path in ("/health", "/ready"):
            assert (await site.calls.get(path)).status_code == 200
        admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        assert (await site.calls.get("/admin/tenants", headers=admin)).status_code == 200
    assert [line["message"] for line in lines] == ["GET /admin/tenants"]

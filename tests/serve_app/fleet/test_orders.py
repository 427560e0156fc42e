"""What administrators order, over real HTTP and a real router."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import httpx
import pytest

from router.messages import Outcome, RequestInfo, Sync
from serve_app.fleet import orders
from serve_app.fleet.orders import OrderBook, Orders
from serve_app.protocol.limits import Limits
from tests.serve_app.metered_site import ADMIN_KEY, MeteredSite, key_of, metered_site, until
from tests.serve_app.sse import events


async def order(site: MeteredSite, method: str, path: str, status: int = 200) -> httpx.Response:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    reply = await site.calls.request(method, path, headers=headers)
    assert reply.status_code == status, reply.text
    return reply


async def running(site: MeteredSite, count: int) -> None:
    await until(lambda: len(site.transport.engines["r"].running) == count)
    await asyncio.sleep(0.3)  # the next sync shows it


async def test_a_paused_tenant_is_stopped_now_and_nobody_else() -> None:
    """What runs, what waits, and what comes, streams and plain calls."""
    async with metered_site(step_s=0.005, a={"max_concurrency": 2}, b={}) as site:
        asking = [asyncio.create_task(site.ask(max_tokens=900, stream=True))]
        await running(site, 1)
        asking += [asyncio.create_task(site.ask(max_tokens=900)) for _ in range(2)]
        other = asyncio.create_task(site.ask("b", max_tokens=200))
        await running(site, 3)
        reply = await order(site, "POST", "/admin/tenants/a/pause")
        assert reply.json() == {"id": "a", "paused": True}
        stream, *plain = await asyncio.wait_for(asyncio.gather(*asking), 2)
        told = events(stream.text)
        assert told[-1]["error"]["code"] == "tenant_paused"
        assert "[DONE]" not in stream.text
        for answer in [*plain, await site.ask()]:
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "tenant_paused"
        assert (await other).status_code == 200
        await site.settled()
        outcomes = site.admission.router.snapshot().usage["a"].outcomes
        assert outcomes[Outcome.CANCELLED] == 3
        assert outcomes[Outcome.FAILED] == 0
        await order(site, "POST", "/admin/tenants/a/resume")
        assert (await site.ask()).status_code == 200
        assert site.refusals == {("a", "tenant_paused"): 3}


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
)
async def test_what_a_paused_tenant_sends_is_not_even_read(path: str) -> None:
    """Whatever it holds; and however much comes, nobody owes anything for it afterwards."""
    limits = Limits(refusals_per_minute=3)
    async with metered_site(limits=limits, a={}, b={}) as site:
        await order(site, "POST", "/admin/tenants/a/pause")
        for _ in range(5):
            async with site.http(key_of("a")) as http:
                answer = await http.post(path, content=b"{" * 200_000)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "tenant_paused"
        await order(site, "POST", "/admin/tenants/a/resume")
        assert (await site.ask()).status_code == 200


async def test_one_request_is_stopped_by_its_id() -> None:
    """All its choices, whether they run or wait."""
    async with metered_site(step_s=0.005, a={"max_concurrency": 3}) as site:
        kept = asyncio.create_task(site.ask(max_tokens=300))
        await running(site, 1)
        stopped = asyncio.create_task(site.ask(max_tokens=900, n=3))
        await running(site, 3)
        listed = (await order(site, "GET", "/admin/requests?tenant=a")).json()["data"]
        [(name, _)] = Counter(each["id"] for each in listed).most_common(1)
        states = [each["state"] for each in listed if each["id"] == name]
        assert sorted(states) == ["running", "running", "waiting"]
        reply = await order(site, "DELETE", f"/admin/requests/{name}")
        assert reply.json() == {"id": name, "sequences": 3}
        answer = await asyncio.wait_for(stopped, 2)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "request_stopped"
        assert (await kept).status_code == 200
        await site.settled()
        await order(site, "DELETE", f"/admin/requests/{name}", 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/admin/tenants/a/pause"),
        ("POST", "/admin/tenants/a/resume"),
        ("DELETE", "/admin/requests/x"),
        ("GET", "/admin/requests"),
    ],
)
async def test_only_administrators_order_and_only_so(method: str, path: str) -> None:
    async with metered_site(a={}) as site:
        assert (await site.calls.request(method, path)).status_code == 401
        wrong = {"POST": "GET"}.get(method, "PUT")
        reply = await order(site, wrong, path, 405)
        assert method in reply.headers["allow"].split(", ")
        assert (await site.ask()).status_code == 200


async def test_who_is_not_known_is_a_404() -> None:
    async with metered_site(a={}) as site:
        await order(site, "POST", "/admin/tenants/nobody/pause", 404)
        await order(site, "DELETE", "/admin/requests/nothing", 404)
        await order(site, "POST", "/admin/tenant/a/stop", 401)  # a path like any other


def test_what_was_stopped_is_told_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of orders there are not more and more."""
    book, info = OrderBook(), RequestInfo("x-0", "a", 1, 1)
    book._open = lambda: iter([(info, "", 0)])  # type: ignore[method-assign]
    assert book.stop("x") == 1
    assert book.orders == Orders(stopped=frozenset({"x"}))
    later = time.monotonic() + orders.TOLD_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert book.orders == Orders()
    assert not book._stopped


def test_what_waits_is_known_by_its_changes() -> None:
    def infos(*names: str) -> tuple[RequestInfo, ...]:
        return tuple(RequestInfo(f"{name}-0", "t", 1, 1) for name in names)

    book = OrderBook()
    book.show(Sync("i", 1, 1, waiting=infos("a", "b")))
    book.show(Sync("i", 2, 1, waiting=infos("c"), gone=("a-0",), base=1))
    book.show(Sync("i", 1, 1, waiting=infos("a", "b")))  # late
    assert [each["id"] for each in book.requests(None)] == ["b", "c"]
    book.show(Sync("i", 3, 1, waiting=infos("c")))
    assert [each["id"] for each in book.requests(None)] == ["c"]

"""configs/haproxy.cfg before a server, with clients that are idle, slow, many, and curious."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from benchmarks.front import fronted
from serve_app.protocol.limits import Limits
from tests.ports import free_ports
from tests.serve_app.metered_site import MeteredSite, key_of, metered_site, until
from tests.serve_app.sse import events

HEAD_S, CLIENT_S = 1, 1
OF_ONE = 8
"""Connections of an address."""
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"


@pytest.fixture
async def site() -> AsyncIterator[MeteredSite]:
    async with metered_site(step_s=0.02, limits=Limits(refusals_per_minute=3), a={}) as running:
        yield running


@pytest.fixture
def ports() -> list[int]:
    """Of clients, and of its numbers."""
    return free_ports(2)


@pytest.fixture
def front(site: MeteredSite, ports: list[int]) -> Iterator[str]:
    """Its URL."""
    bounds = {
        "FRONT_NUMBERS": f"127.0.0.1:{ports[1]}",
        "FRONT_HEAD_TIMEOUT": f"{HEAD_S}s",
        "FRONT_CLIENT_TIMEOUT": f"{CLIENT_S}s",
        "FRONT_CONNECTIONS_OF_ONE": str(OF_ONE),
    }
    with fronted(site.url, ports[0], bounds) as url:
        yield url


@contextmanager
def connections(port: int, count: int, address: str) -> Iterator[list[socket.socket]]:
    """That send half a request."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", port), 5, (address, 0))
            stack.enter_context(one)
            with suppress(OSError):
                one.sendall(HALF)
            made.append(one)
        yield made


def closed(one: socket.socket, within_s: float) -> bool:
    one.settimeout(within_s)
    try:
        while one.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def calls(front: str, address: str = "127.0.0.1") -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(local_address=address)
    headers = {"Authorization": f"Bearer {key_of('a')}"}
    return httpx.AsyncClient(base_url=front, transport=transport, headers=headers, timeout=10)


def body(**fields: object) -> dict[str, object]:
    return {"model": "text", "prompt": "hello", "max_tokens": 5, "ignore_eos": True, **fields}


async def test_who_has_many_connections_keeps_nobody_else_out(
    site: MeteredSite, front: str, ports: list[int]
) -> None:
    """Beyond its number an address gets none; others go on, also those that came before."""
    async with calls(front, "127.0.0.3") as other:
        assert (await other.post("/v1/completions", json=body())).status_code == 200
        with connections(ports[0], OF_ONE, "127.0.0.2") as held:
            async with calls(front, "127.0.0.2") as attacker:
                with pytest.raises(httpx.TransportError):
                    await attacker.get("/health")
            assert (await other.get("/health")).status_code == 200
            assert not closed(held[0], 0.1)
        assert (await other.get("/health")).status_code == 200


async def test_idle_and_slow_heads_are_let_go(
    site: MeteredSite, front: str, ports: list[int]
) -> None:
    """Also one that sends a byte now and then."""
    with connections(ports[0], 3, "127.0.0.2") as (half, slow, idle):
        began = time.monotonic()
        while time.monotonic() < began + HEAD_S + 0.5:
            with suppress(OSError):
                slow.sendall(b"x")
            await asyncio.sleep(0.1)
        ended = [await asyncio.to_thread(closed, one, 1.0) for one in (half, slow, idle)]
    assert ended == [True] * 3


async def test_who_stops_within_a_body_is_let_go(
    site: MeteredSite, front: str, ports: list[int]
) -> None:
    key = key_of("a").encode()
    head = HALF + b"Authorization: Bearer " + key + b"\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", ports[0])) as one:
        one.sendall(head + b"Content-Length: 1000\r\n\r\n{")
        assert await asyncio.to_thread(closed, one, CLIENT_S + 2.0)


async def test_answers_take_as_long_as_they_take(site: MeteredSite, front: str) -> None:
    """Longer than a client may do nothing, as a whole and as a stream."""
    tokens = int((CLIENT_S + 1) / 0.02)
    async with calls(front) as client:
        began = time.monotonic()
        plain, stream = await asyncio.gather(
            client.post("/v1/completions", json=body(max_tokens=tokens)),
            client.post("/v1/completions", json=body(max_tokens=tokens, stream=True)),
        )
    assert time.monotonic() - began > CLIENT_S + 0.5
    assert plain.json()["usage"]["completion_tokens"] == tokens
    assert events(stream.text)[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_who_hangs_up_ends_the_work(site: MeteredSite, front: str, stream: bool) -> None:
    """Or one engine would compute for minutes what nobody reads."""
    async with calls(front) as client:
        asked = body(max_tokens=5000, stream=stream)
        request = asyncio.create_task(client.post("/v1/completions", json=asked))
        await until(lambda: not site.client.idle)
        request.cancel()
    await until(lambda: site.client.idle, 5)


@pytest.mark.parametrize(
    "path",
    [
        "/admin/tenants",
        "//admin/tenants",
        "/%61dmin/tenants",
        "/dashboard",
        "/metrics",
        "/-/routes",
        "/-/healthz",
    ],
)
async def test_administration_and_rays_paths_are_not_for_clients(
    site: MeteredSite, front: str, path: str
) -> None:
    async with calls(front) as client:
        answer = await client.get(front + path)
    assert (answer.status_code, answer.text[:1]) == (404, "")


async def test_numbers_are_told_on_this_machine_only(
    site: MeteredSite, front: str, ports: list[int]
) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{ports[1]}/metrics")
        assert "haproxy_frontend_connections_total" in answer.text
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.2:{ports[1]}/metrics")


async def test_each_address_without_a_key_has_its_own_bucket_whatever_it_says(
    site: MeteredSite, front: str
) -> None:
    statuses = []
    for address, says in [("127.0.0.2", f"192.0.2.{n}") for n in range(5)] + [("127.0.0.3", "")]:
        transport = httpx.AsyncHTTPTransport(local_address=address)
        async with httpx.AsyncClient(base_url=front, transport=transport) as client:
            headers = {"X-Forwarded-For": says} if says else {}
            answer = await client.post("/v1/completions", headers=headers)
            statuses.append(answer.status_code)
    assert statuses == [401, 401, 401, 429, 429, 401]

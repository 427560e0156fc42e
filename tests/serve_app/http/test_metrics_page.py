"""Who may read `/metrics`, over real HTTP."""

from __future__ import annotations

from ipaddress import ip_network

import httpx
import pytest
from fastapi import FastAPI

from serve_app.http.metrics_page import MetricsPage


async def text() -> bytes:
    return b"fairstream_x 1\n"


def calls(*allowed: str, client: str = "10.1.2.3") -> httpx.AsyncClient:
    app = FastAPI()
    app.add_middleware(
        MetricsPage,
        is_admin=lambda key: key == "admin",
        allowed=[ip_network(each) for each in allowed],
        text=text,
    )
    transport = httpx.ASGITransport(app, client=(client, 1))
    return httpx.AsyncClient(base_url="http://here", transport=transport)


@pytest.mark.parametrize("key", ["", "Bearer wrong", "Basic admin"])
async def test_who_is_neither_administrator_nor_allowed_is_refused(key: str) -> None:
    async with calls("10.1.2.4", "192.168.0.0/16", "::/0") as client:
        answer = await client.get("/metrics", headers={"Authorization": key})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "fairstream_x" not in answer.text


@pytest.mark.parametrize("client", ["10.1.2.3", "10.1.200.9"])
async def test_addresses_that_are_allowed_need_no_key(client: str) -> None:
    async with calls("10.1.0.0/16", client=client) as allowed:
        answer = await allowed.get("/metrics")
    assert (answer.status_code, answer.text) == (200, "fairstream_x 1\n")
    assert answer.headers["content-type"].startswith("text/plain; version=")


async def test_an_administrator_reads_and_does_nothing_else() -> None:
    async with calls() as client:
        client.headers["Authorization"] = "Bearer admin"
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.head("/metrics")).status_code == 200
        answer = await client.post("/metrics")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
        assert (await client.get("/metrics/x")).status_code == 404


async def test_a_client_without_an_address_is_nobody() -> None:
    async with calls("0.0.0.0/0", client="testclient") as client:
        assert (await client.get("/metrics")).status_code == 401

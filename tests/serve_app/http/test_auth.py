from __future__ import annotations

import http.client
import logging
import socket
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from router.tenant import Tenant, Tenants, digest
from serve_app.http.auth import PUBLIC_PATHS, BearerAuth
from serve_app.throttling.refusal_limit import RefusalLimit
from tests.serve_app.conftest import KEY, Site

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/text")
LONG_KEY = "x" * 5000
BAD_KEYS = (
    None,
    "",
    "Bearer",
    "Bearer ",
    "Bearer wrong",
    f"Bearer {KEY}x",
    f"Bearer {KEY[:-1]}",
    f"Basic {KEY}",
    f"Bearer{KEY}",
    f"Bearer x {KEY}",
    f"Bearer {digest(KEY)}",
    KEY,
    f"Bearer {LONG_KEY}",
    "Bearer \xff\xfe",
)


def send(site: Site, method: str, path: str, *keys: str | None) -> tuple[int, bytes, Any]:
    """As it is written: no client tidies the path."""
    connection = http.client.HTTPConnection(site.url.removeprefix("http://"), timeout=10)
    connection.putrequest(method, path, skip_accept_encoding=True)
    for key in keys:
        if key is not None:
            connection.putheader("Authorization", key)
    connection.endheaders()
    reply = connection.getresponse()
    result = reply.status, reply.read(), reply.headers
    connection.close()
    return result


def test_every_route_is_closed_unless_it_is_listed(site: Site) -> None:
    """C53, R41: found by asking the application for its routes."""
    assert isinstance(site.app, FastAPI)
    routes = [route for route in site.app.routes if isinstance(route, APIRoute)]
    assert len(routes) == len(site.app.routes) >= 6
    for route in routes:
        path = route.path.replace("{name:path}", "text")
        for method in route.methods:
            for key in (None, "Bearer wrong"):
                status = send(site, method, path, key)[0]
                assert (status == 401) == (path not in PUBLIC_PATHS)


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    "path",
    [
        *PATHS,
        "/",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/invocations",
        "/metrics",
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/v1/%6dodels",
        "/%76%31/models",
        "/V1/models",
        "/health/../v1/models",
        "/health/..%2fv1/models",
        "/health/",
        "//health",
        "/health/v1/models",
        "/healthz",
        "/v1/models?/health",
        "/v1/models#/health",
        "/v1/models;/health",
        "/v1/models%3f/health",
    ],
)
def test_no_way_in_without_a_key(site: Site, method: str, path: str) -> None:
    """C53."""
    assert send(site, method, path)[0] == 401


@pytest.mark.parametrize("path", PATHS)
def test_every_bad_key_gets_the_same_answer(
    site: Site, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R41: short, in OpenAI's shape, without a trace of the key; in the log neither."""
    with caplog.at_level(logging.DEBUG):
        replies = [send(site, "POST", path, key) for key in BAD_KEYS]
        replies.append(send(site, "POST", path, f"Bearer {KEY}", f"Bearer {KEY}"))
    assert {status for status, _, _ in replies} == {401}
    assert len({body for _, body, _ in replies}) == 1
    assert len(replies[0][1]) < 200
    assert httpx.Response(401, content=replies[0][1]).json()["error"]["code"] == "invalid_api_key"
    assert replies[0][2]["www-authenticate"] == "Bearer"
    for key in (KEY, LONG_KEY):
        assert key[:12] not in caplog.text
        assert digest(key).partition(":")[2] not in caplog.text


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "Bearer   "])
def test_the_scheme_may_be_in_any_case(site: Site, scheme: str) -> None:
    """C53."""
    assert send(site, "GET", "/v1/models", scheme + KEY)[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/models", 405),
        ("HEAD", "/v1/models", 405),
        ("POST", "/v1/completions/", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/%6dodels", 200),
    ],
)
def test_with_a_key_a_wrong_url_is_a_plain_error(
    site: Site, method: str, path: str, status: int
) -> None:
    """C53: no redirect, and OpenAI's shape."""
    got, body, _ = send(site, method, path, f"Bearer {KEY}")
    assert got == status
    if status != 200 and method != "HEAD":
        assert b'"invalid_request_error"' in body


@pytest.mark.parametrize("path", sorted(PUBLIC_PATHS))
def test_probes_have_no_key(site: Site, path: str) -> None:
    assert send(site, "GET", path)[0] == 200
    assert send(site, "GET", path, "Bearer wrong")[0] == 200


def test_a_new_route_is_closed() -> None:
    """C53: default deny, websockets included."""
    tenants = Tenants(tenants=[Tenant(id="acme", keys=[digest(KEY)])])
    app = FastAPI()
    app.add_middleware(BearerAuth, find_tenant=tenants.find_by_key, refusal_limit=RefusalLimit(60))
    app.add_api_route("/new", lambda: "open")
    app.add_api_websocket_route("/socket", lambda websocket: websocket.accept())
    client = TestClient(app)
    assert client.get("/new").status_code == 401
    assert client.get("/new", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/socket"):
        pass


def test_an_empty_key_belongs_to_nobody() -> None:
    """Even if a digest of nothing was configured by mistake."""
    tenants = Tenants(tenants=[Tenant(id="acme", keys=[digest("")])])
    app = FastAPI()
    app.add_middleware(BearerAuth, find_tenant=tenants.find_by_key, refusal_limit=RefusalLimit(60))
    app.add_api_route("/new", lambda: "open")
    assert TestClient(app).get("/new").status_code == 401


def test_the_path_behind_a_prefix_is_what_counts() -> None:
    app = FastAPI()
    app.add_middleware(
        BearerAuth, find_tenant=Tenants(tenants=[]).find_by_key, refusal_limit=RefusalLimit(60)
    )
    app.add_api_route("/health", lambda: "up")
    client = TestClient(app, root_path="/llm")
    assert client.get("/llm/health").status_code == 200
    assert client.get("/llm/other").status_code == 401


def test_a_bare_line_without_headers_is_answered(site: Site) -> None:
    host, port = site.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_what_is_public_takes_no_post(http: httpx.Client, path: str) -> None:
    assert http.post(path, headers={"Authorization": ""}).status_code == 405

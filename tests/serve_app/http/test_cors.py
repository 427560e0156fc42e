"""Web pages that call the API from a browser: what that asks first, and what scripts may read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError
from starlette.middleware import Middleware
from transformers import PreTrainedTokenizerFast

from serve_app.fleet.departure import Departure, TurnAway
from serve_app.http.api import create_app
from serve_app.http.cors import EXPOSED
from serve_app.protocol.backend import Refused
from serve_app.protocol.limits import Limits
from tests.serve_app.asking import CHAT, chat
from tests.serve_app.conftest import ACME, KEY, Site, serve
from tests.serve_app.text_backend import TextBackend

PAGE, OTHER = "https://app.example.com", "https://evil.example.com"
LIMITS = Limits(cors_origins=(PAGE, "http://localhost:5173"))
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture(scope="module")
def open_site(tokenizer: PreTrainedTokenizerFast) -> Iterator[Site]:
    with serve(TextBackend(), tokenizer, LIMITS) as site:
        yield site


@pytest.fixture
def browser(open_site: Site) -> Iterator[httpx.Client]:
    open_site.backend.reset()
    with httpx.Client(base_url=open_site.url, headers={"Origin": PAGE}, timeout=10) as client:
        yield client
    open_site.wait_until_idle()


def words(header: str) -> set[str]:
    return {word.strip().lower() for word in header.split(",")}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/models", "/tokenize"])
@pytest.mark.parametrize("origin", LIMITS.cors_origins)
def test_what_a_browser_asks_first_needs_no_key(
    browser: httpx.Client, path: str, origin: str
) -> None:
    reply = browser.options(path, headers=PREFLIGHT | {"Origin": origin})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == origin
    assert {"get", "post"} <= words(reply.headers["access-control-allow-methods"])
    allowed = words(reply.headers["access-control-allow-headers"])
    assert words(PREFLIGHT["Access-Control-Request-Headers"]) <= allowed
    assert "origin" in words(reply.headers["vary"])


def test_another_page_may_nothing(browser: httpx.Client) -> None:
    asked = browser.options(CHAT, headers=PREFLIGHT | {"Origin": OTHER})
    called = browser.post(CHAT, json=chat(), headers={"Origin": OTHER})
    for reply in (asked, called):
        assert reply.status_code in (400, 401)
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("fields", "status"),
    [({}, 200), ({"stream": True}, 200), ({"n": 0}, 400), ({"model": "other"}, 404)],
)
def test_a_page_reads_answers_streams_and_refusals(
    browser: httpx.Client, fields: dict[str, Any], status: int
) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = browser.post(CHAT, json=chat(**fields), headers=headers)
    assert reply.status_code == status
    assert readable(reply)
    if fields.get("stream"):
        assert reply.text.endswith("data: [DONE]\n\n")


def readable(reply: httpx.Response) -> bool:
    exposed = words(reply.headers["access-control-expose-headers"])
    assert exposed == {name.lower() for name in EXPOSED}
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= exposed
    return bool(reply.headers["access-control-allow-origin"] == PAGE)


def test_a_page_reads_why_it_gets_nothing(browser: httpx.Client, open_site: Site) -> None:
    assert readable(browser.post(CHAT, json=chat())), "401"
    headers = {"Authorization": f"Bearer {KEY}"}
    open_site.backend.refusal = Refused("too many", 3)
    reply = browser.post(CHAT, json=chat(), headers=headers)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")
    assert readable(reply)
    open_site.backend.reset()
    open_site.backend.crash_after = 0
    reply = browser.post(CHAT, json=chat(), headers=headers)
    assert reply.status_code == 500
    assert readable(reply)


async def test_a_layer_around_the_application_is_inside_of_it() -> None:
    """Whatever answers in place of the routes."""
    departure = Departure("ingress", 60.0)
    departure.dismiss()
    layers = [Middleware(TurnAway, departure=departure)]
    app = create_app([], ACME.find_by_key, LIMITS, layers=layers)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        reply = await client.get("/ready", headers={"Origin": PAGE})
        assert reply.status_code == 503
        assert readable(reply)
        assert (await client.options(CHAT, headers=PREFLIGHT | {"Origin": PAGE})).is_success


async def test_any_page_may_if_the_settings_say_so() -> None:
    app = create_app([], ACME.find_by_key, Limits(cors_origins=("*",)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for reply in (
            await client.options(CHAT, headers=PREFLIGHT | {"Origin": OTHER}),
            await client.post(CHAT, json=chat(), headers={"Origin": OTHER}),
        ):
            assert reply.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in reply.headers


def test_no_page_may_by_default(http: httpx.Client) -> None:
    preflight = http.options(CHAT, headers=PREFLIGHT | {"Origin": PAGE, "Authorization": ""})
    assert preflight.status_code == 401
    reply = http.post(CHAT, json=chat(), headers={"Origin": PAGE})
    assert reply.status_code == 200
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origins",
    [
        PAGE,
        ["app.example.com"],
        [PAGE + "/"],
        [PAGE + "/x"],
        ["https://A.com"],
        ["https://*.x.com"],
        [1],
    ],
)
def test_what_is_no_origin_is_no_setting(origins: object) -> None:
    with pytest.raises(ValidationError, match="cors_origins"):
        TypeAdapter(Limits).validate_python({"cors_origins": origins})
    assert TypeAdapter(Limits).validate_python({"cors_origins": [PAGE, "*"]}).cors_origins

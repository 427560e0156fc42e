"""Several models behind one address."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from router.tenant import Tenant, Tenants, digest
from serve_app.http.models import Offer
from serve_app.protocol.backend import ServedModel, Unavailable
from tests.serve_app.asking import CHAT, TEXT, chat, refused, text
from tests.serve_app.conftest import KEY, LIMITS, Site, serve_offers
from tests.serve_app.text_backend import MODEL, TextBackend

ONE_ONLY = "sk-one-only"
TENANTS = Tenants(
    tenants=[
        Tenant(id="acme", keys=[digest(KEY)]),
        Tenant(id="narrow", keys=[digest(ONE_ONLY)], models=["large"], max_context=100),
    ]
)


@pytest.fixture(scope="module")
def offers(tokenizer: PreTrainedTokenizerFast, smollm2: PreTrainedTokenizerFast) -> list[Offer]:
    """`large` has a vocabulary and a context of its own."""
    large = replace(MODEL, name="large", vocab_size=smollm2.vocab_size + 500, max_model_len=400)
    return [
        Offer("text", TextBackend(), tokenizer, aliases=["default", "text-alias"]),
        Offer("large", TextBackend(large), smollm2, aliases=["big"]),
    ]


@pytest.fixture(scope="module")
def running(offers: list[Offer]) -> Iterator[Site]:
    with serve_offers(offers, LIMITS, TENANTS) as site:
        yield site


@pytest.fixture
def backends(offers: list[Offer]) -> Iterator[list[TextBackend]]:
    """Fresh for each test."""
    backends = [offer.backend for offer in offers]
    models = [backend.model_ for backend in backends]  # type: ignore[attr-defined]
    for backend, model in zip(backends, models, strict=True):
        vars(backend).update(vars(TextBackend(model)))
    yield backends  # type: ignore[misc]
    for backend, model in zip(backends, models, strict=True):
        vars(backend).update(vars(TextBackend(model)))


@pytest.fixture
def http(running: Site, backends: list[TextBackend]) -> Iterator[httpx.Client]:
    with client_of(running, KEY) as client:
        yield client


@pytest.fixture
def narrow(running: Site, backends: list[TextBackend]) -> Iterator[httpx.Client]:
    """A tenant that may use one model, and not much of it."""
    with client_of(running, ONE_ONLY) as client:
        yield client


def client_of(site: Site, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=site.url, headers=headers, timeout=10)


def names(client: httpx.Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


@pytest.mark.parametrize(
    ("asked", "place"), [("text", 0), ("default", 0), ("large", 1), ("big", 1)]
)
def test_a_request_goes_to_the_model_that_it_names(
    http: httpx.Client, backends: list[TextBackend], asked: str, place: int
) -> None:
    for path, body in ((CHAT, chat(model=asked)), (TEXT, text(model=asked))):
        assert http.post(path, json=body).json()["model"] == ("text", "large")[place]
    assert len(backends[place].generations) == 2
    assert not backends[1 - place].generations


def test_each_model_has_its_own_tokens_and_context(
    http: httpx.Client, backends: list[TextBackend], smollm2: PreTrainedTokenizerFast
) -> None:
    ids = smollm2("hello there")["input_ids"]
    assert http.post("/tokenize", json=text(prompt="hello there")).json()["count"] == 11
    reply = http.post("/tokenize", json=text(model="big", prompt="hello there")).json()
    assert (reply["tokens"], reply["max_model_len"]) == (ids, 400)
    assert http.post("/detokenize", json={"model": "big", "tokens": ids}).json() == {
        "prompt": "hello there"
    }
    beyond = {"model": "text", "tokens": ids}
    assert refused(http.post("/detokenize", json=beyond))["param"] == "tokens"
    long = [1] * 300
    assert refused(http.post(TEXT, json=text(prompt=long)))["code"] == "context_length_exceeded"
    assert http.post(TEXT, json=text(prompt=long, model="large")).status_code == 200


def test_the_models_are_listed_by_all_their_names(http: httpx.Client, running: Site) -> None:
    assert names(http) == ["text", "default", "text-alias", "large", "big"]
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == names(http)
        card = client.models.retrieve("big").model_extra
    assert (card["root"], card["max_model_len"]) == ("large", 400)


def test_a_tenant_sees_only_what_it_may_use_and_as_it_may_use_it(narrow: httpx.Client) -> None:
    assert names(narrow) == ["large", "big"]
    lengths = {card["max_model_len"] for card in narrow.get("/v1/models").json()["data"]}
    assert lengths == {100}


@pytest.mark.parametrize("name", ["text", "default"])
def test_a_model_that_a_tenant_may_not_use_looks_as_if_there_were_none(
    narrow: httpx.Client, name: str
) -> None:
    """On every route, and in the same words; an alias is no way around."""
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        body = {CHAT: chat(), "/detokenize": {"tokens": [1]}}.get(path, text())
        hidden = narrow.post(path, json=body | {"model": name})
        missing = narrow.post(path, json=body | {"model": "nothing"})
        assert refused(hidden, 404)["code"] == "model_not_found"
        assert hidden.json() == missing.json()
        assert narrow.post(path, json=body | {"model": "big"}).status_code == 200
    assert narrow.get(f"/v1/models/{name}").json() == narrow.get("/v1/models/nothing").json()
    assert narrow.get(f"/v1/models/{name}").status_code == 404
    assert narrow.get("/v1/models/big").status_code == 200


def test_the_application_is_ready_when_every_model_is(
    http: httpx.Client, narrow: httpx.Client, backends: list[TextBackend]
) -> None:
    """Meanwhile the ones that are up serve, and the others say when to come back."""
    assert http.get("/ready").status_code == 200
    backends[1].unavailable = Unavailable(3.0)
    assert http.get("/ready").status_code == 503
    assert names(http) == ["text", "default", "text-alias"]
    assert http.post(CHAT, json=chat()).status_code == 200
    for reply in (
        http.post(CHAT, json=chat(model="big")),
        http.get("/v1/models/big"),
        narrow.get("/v1/models"),
    ):
        assert refused(reply, 503)["code"] == "unavailable"
        assert reply.headers["retry-after"] == "3"
    refused(http.post(CHAT, json=chat(model="nothing")), 404)


def test_models_that_are_not_there_are_waited_for_at_once(
    http: httpx.Client, backends: list[TextBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each for seconds, where a front end has never seen it."""
    waiting = most = 0

    async def come_late(self: TextBackend) -> ServedModel:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.1)
        waiting -= 1
        raise Unavailable(3.0)

    monkeypatch.setattr(TextBackend, "model", come_late)
    refused(http.get("/v1/models"), 503)
    assert most == 2

"""The document of the API fits the API."""

from __future__ import annotations

import warnings
from typing import Any

import httpx
import jsonschema
import pytest

from serve_app.http.api import create_app
from serve_app.protocol.limits import Limits
from tests.serve_app.asking import CHAT, TEXT, chat, text
from tests.serve_app.conftest import Site
from tests.serve_app.text.test_tool_calls import WEATHER


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    made: dict[str, Any] = http.get("/openapi.json").json()
    return made


def test_it_is_made_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create_app([], lambda key: None, Limits())


def test_it_has_every_route_but_itself(document: dict[str, Any], site: Site) -> None:
    served = {route.path for route in site.app.routes}  # type: ignore[attr-defined]
    shown = {path.replace("{name}", "{name:path}") for path in document["paths"]}
    assert served - shown == {"/openapi.json"}
    assert shown <= served


@pytest.mark.parametrize(
    ("path", "body", "fits"),
    [
        (CHAT, chat(), True),
        (CHAT, chat(stop=["a"], logit_bias={"1": 2.5}, tools=[WEATHER], tool_choice="auto"), True),
        (CHAT, chat(response_format={"type": "json_object"}, user=None, unheard_of=1), True),
        (CHAT, {"model": "text"}, False),
        (CHAT, chat(temperature=3), False),
        (CHAT, chat(n="1"), False),
        (TEXT, text(prompt=[[1, 2], [3]], echo=True, logprobs=3, best_of=2), True),
        (TEXT, text(prompt={"a": 1}), False),
        ("/tokenize", text(), True),
        ("/detokenize", {"model": "text", "tokens": [1]}, True),
        ("/detokenize", {"model": "text", "tokens": ["1"]}, False),
        ("/detokenize", {"tokens": [1]}, False),
    ],
)
def test_its_schemas_fit_what_is_served(
    document: dict[str, Any], http: httpx.Client, path: str, body: dict[str, Any], fits: bool
) -> None:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"] | {"components": document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(body) == fits
    if not fits:
        reply = http.post(path, json=body)
        assert reply.status_code == 400
        error = schema["components"]["schemas"]["Error"]
        jsonschema.validate(reply.json(), error)

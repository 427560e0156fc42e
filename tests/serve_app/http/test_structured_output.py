"""Schemas, grammars and calls of tools, as OpenAI's client asks for them and reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.serve_app.conftest import KEY
from tests.serve_app.tiny_site import NAME, arguments, tiny_model, tiny_site


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        tiny_site(tiny_model(), tmp_path_factory.mktemp("tiny")) as site,
        openai.OpenAI(base_url=f"{site.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


class Order(BaseModel):
    colour: Literal["red", "green"]
    count: Annotated[int, Field(ge=0, le=99)]
    tags: Annotated[list[Literal["a", "b"]], Field(max_length=3)]


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_is_followed(client: openai.OpenAI, seed: int) -> None:
    """With the client's own parsing of pydantic models; beside free answers."""
    answer = client.chat.completions.parse(
        model=NAME,
        messages=[{"role": "user", "content": "Order!"}],
        response_format=Order,
        seed=seed,
        max_tokens=100,
    )
    message = answer.choices[0].message
    assert isinstance(message.parsed, Order)
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        model=NAME,
        messages=[{"role": "user", "content": "Order!"}],
        response_format=Order,
        seed=seed,
        max_tokens=100,
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == message.content


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-(left|right)"}, r"[0-9]{3}-(left|right)"),
        (
            {"guided_choice": ["yes.", "no (never)", "vielleicht\n"]},
            r"yes\.|no \(never\)|vielleicht\n",
        ),
        ({"guided_grammar": 'start: "<" /[a-c]{2}/ ">"'}, "<[a-c]{2}>"),
        ({"guided_json": '{"enum": ["a b", 1]}'}, r'"a b"|1'),
        ({"guided_json": {"type": "boolean"}, "n": 2, "bad_words": ["true"]}, "false"),
    ],
)
def test_guided_output(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    body = {"prompt": "Once upon", "max_tokens": 40, "temperature": 1.5, "seed": 4, **fields}
    answer = client.completions.create(model=NAME, **arguments(body))
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text)
        assert choice.finish_reason == "stop"


def test_a_grammar_that_grows_too_complex_is_the_clients_fault(client: openai.OpenAI) -> None:
    """It can be compiled; where it leads shows while the answer is generated."""
    schema = {"type": "object", "properties": {f"f{i}": {"type": "null"} for i in range(1000)}}
    body = {"prompt": "Once upon", "max_tokens": 24, "guided_json": schema}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, **arguments(body))
    assert caught.value.code == "grammar_too_complex"


def test_any_object_is_json(client: openai.OpenAI) -> None:
    """A random model says anything: what it said until the limit begins an object."""
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "JSON"}],
        response_format={"type": "json_object"},
        max_tokens=50,
        seed=1,
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Bonn", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", NOW, allowed("required", NOW)])
def test_calls_are_made_as_asked_for(client: openai.OpenAI, choice: Any, parallel: bool) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 300,
        "seed": 5,
    }
    answer = client.chat.completions.create(model=NAME, **body).choices[0]
    calls = answer.message.tool_calls or []
    assert answer.finish_reason == "tool_calls"
    assert calls
    assert len(calls) == 1 or (parallel and choice != NOW)
    for call in calls:
        wanted = {"weather": ({"city": "Bonn"}, {"city": "Rome"}), "now": ({},)}
        assert json.loads(call.function.arguments) in wanted[call.function.name]
        assert choice == "required" or call.function.name == "now"
    with client.chat.completions.stream(model=NAME, **body) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [c.function.arguments for c in streamed] == [c.function.arguments for c in calls]


@pytest.mark.parametrize("schema", [None, {"type": "boolean"}])
def test_text_or_calls(client: openai.OpenAI, schema: Any) -> None:
    """Free text stays free; a schema and tools together allow either."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "seed": 5}
    if schema:
        form = {"name": "b", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    answer = client.chat.completions.create(model=NAME, tools=TOOLS, max_tokens=300, **body)
    message = answer.choices[0].message
    if schema and not message.tool_calls:
        assert message.content in ("true", "false")
    assert message.content or message.tool_calls

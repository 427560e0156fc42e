"""Tools that are not strict are held to as much of their schemas as a grammar can follow."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from serve_app.protocol.backend import ServedModel
from serve_app.protocol.errors import ApiError
from serve_app.protocol.requests import ChatRequest
from serve_app.text import grammars
from serve_app.text.call_forms import FORMS, HERMES, MISTRAL, CallForm
from serve_app.text.grammar_trial import GrammarTrial
from serve_app.text.grammars import grammar_of
from tests.serve_app.mcp_tools import mcp_tools
from tests.serve_app.text.test_grammars import BOMBS, accepts

MODEL = ServedModel("text", 0, vocab_size=300, eos_token_ids=(256,), max_model_len=200)
TRIAL = GrammarTrial()
GOOD = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


async def grammar(*tools: Any, form: CallForm = HERMES, **fields: Any) -> str:
    turns = [{"role": "user", "content": "x"}]
    body = {"model": "text", "messages": turns, "tools": list(tools), **fields}
    return await grammar_of(
        ChatRequest.model_validate(body), MODEL, partial(TRIAL.error, "a"), form=form
    )


def calls(made: str, name: str, arguments: Any) -> bool:
    return accepts(made, HERMES.written(name, json.dumps(arguments)))


def field(**schema: Any) -> dict[str, Any]:
    """Of an object whose other field keeps its constraints."""
    return {
        "type": "object",
        "properties": {"s": schema, "n": {"type": "integer"}},
        "required": ["s", "n"],
        "additionalProperties": False,
    }


FINE_PRINT = {
    "look-ahead": (field(type="string", pattern="^(?!x).*$"), {"s": "a", "n": 1}),
    "word border": (field(type="string", pattern=r"\bfoo\b"), {"s": "foo", "n": 1}),
    "back-reference": (field(type="string", pattern=r"(a)\1"), {"s": "aa", "n": 1}),
    "bounds of a float": (
        field(type="number", minimum=-3.4028234663852886e38, maximum=3.4028234663852886e38),
        {"s": 1.5, "n": 1},
    ),
    "bounds of 64 bits": (
        field(type="integer", minimum=-(2**63), maximum=2**63 - 1),
        {"s": 1, "n": 1},
    ),
    "impossible bounds": (field(type="integer", minimum=3, maximum=1), {"s": 1, "n": 1}),
    "names by pattern": (
        field(type="object", patternProperties={"^(?!x)": {}}, additionalProperties=False),
        {"s": {"a": 1}, "n": 1},
    ),
    "format and pattern": (
        field(type="string", format="uuid", pattern="(?=a)"),
        {"s": "a", "n": 1},
    ),
}
HOPELESS = {
    "reference to nothing": field(**{"$ref": "#/definitions/none"}),
    "reference elsewhere": field(**{"$ref": "https://example.org/schema"}),
    "unknown type": field(type="text"),
    "required of draft 3": field(type="object", required=True),
}


@pytest.mark.parametrize("case", FINE_PRINT)
async def test_a_constraint_that_cannot_be_followed_is_dropped(case: str) -> None:
    schema, arguments = FINE_PRINT[case]
    made = await grammar(tool("bad", schema), tool("good", GOOD))
    assert calls(made, "bad", arguments)
    assert not calls(made, "bad", {**arguments, "n": "no integer"})
    assert calls(made, "good", {"n": 1})
    assert not calls(made, "good", {"n": "a"})


@pytest.mark.parametrize("case", HOPELESS)
async def test_a_schema_that_cannot_be_followed_at_all_is_any_object(case: str) -> None:
    made = await grammar(tool("bad", HOPELESS[case]), tool("good", GOOD))
    assert calls(made, "bad", {"anything": [1]})
    assert not calls(made, "bad", [1])
    assert not calls(made, "good", {"n": "a"})


@pytest.mark.parametrize("case", [*FINE_PRINT, *HOPELESS])
async def test_a_strict_tool_is_held_to_its_schema_or_refused(case: str) -> None:
    schema = FINE_PRINT[case][0] if case in FINE_PRINT else HOPELESS[case]
    with pytest.raises(ApiError) as refused:
        await grammar(tool("good", GOOD), tool("bad", schema, strict=True))
    assert refused.value.param == "tools"
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    with pytest.raises(ApiError) as refused:
        await grammar(**fields)
    assert refused.value.param == "response_format"


async def test_what_is_too_complex_is_any_object_and_harms_nobody() -> None:
    bomb = BOMBS["takes hours"]["guided_json"]
    bad = tool("bad", {"type": "object", "properties": {"a": bomb}})
    made = await grammar(bad, tool("good", GOOD, strict=True))
    assert calls(made, "bad", {"b": 1})
    assert not calls(made, "good", {"n": "a"})


async def test_the_search_for_what_fails_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial serves all clients of this front end."""
    monkeypatch.setattr(grammars, "SEARCH_S", 0.2)
    slow = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a{900}){90}"}}}
    tools = [tool(f"slow{number}", slow) for number in range(50)]
    started = time.monotonic()
    made = await grammar(*tools, tool("bad", HOPELESS["unknown type"]))
    assert time.monotonic() - started < 8
    assert calls(made, "bad", {})


async def test_it_is_told_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    grammars._log_once.cache_clear()
    caplog.set_level(logging.WARNING)
    schema = field(type="string", pattern="(?<!told once)x")
    for _ in range(2):
        await grammar(tool("bad", schema))
    assert caplog.text.count("look-around") == 1
    assert "told once" not in caplog.text


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.mark + form.open)
async def test_an_agents_whole_set_of_tools_is_followed(form: CallForm) -> None:
    tools = mcp_tools()
    assert len(tools) == 58
    assert len(json.dumps(tools)) > 100_000
    made = await grammar(*tools, form=form)
    name = "github_list_issues"
    required = {"owner": "o", "per_page": 1, "cursor": None, "labels": [], "state": "open"}
    properties = next(t for t in tools if t["function"]["name"] == name)["function"]["parameters"]
    arguments = {key: required.get(key, "x") for key in properties["required"]}
    assert accepts(made, form.written(name, json.dumps(arguments)))
    assert not accepts(made, form.written(name, json.dumps({**arguments, "none": 1})))


HARMLESS = {
    "annotations": {"type": "string", "title": "t" * 70_000, "examples": ["a"], "x-order": 1},
    "names": {"type": "object", "propertyNames": {"type": "string"}},
    "format": {"type": "string", "format": "uri-reference"},
    "own format": {"type": "string", "format": "my-format"},
    "content": {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
    "unique": {"type": "array", "uniqueItems": False},
}


@pytest.mark.parametrize("case", HARMLESS)
@pytest.mark.parametrize("where", ["response_format", "guided_json", "strict tool"])
async def test_what_constrains_nothing_is_no_reason_to_refuse(case: str, where: str) -> None:
    schema = field(**HARMLESS[case])
    value = {"string": "a", "object": {}, "array": []}[HARMLESS[case]["type"]]
    arguments = {"s": value, "n": 1}
    if where == "strict tool":
        assert calls(await grammar(tool("f", schema, strict=True)), "f", arguments)
    elif where == "guided_json":
        assert accepts(await grammar(guided_json=schema), json.dumps(arguments))
    else:
        form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
        assert accepts(await grammar(response_format=form), json.dumps(arguments))
        beside = await grammar(tool("f", GOOD), response_format=form)
        assert accepts(beside, json.dumps(arguments))
        assert calls(beside, "f", {"n": 1})


async def test_a_mark_whose_token_the_model_has_not_is_spelled() -> None:
    form = replace(MISTRAL, special=(("[TOOL_CALLS]", MODEL.vocab_size),))
    made = await grammar(tool("f", GOOD), form=form)
    assert accepts(made, form.written("f", '{"n": 1}'))

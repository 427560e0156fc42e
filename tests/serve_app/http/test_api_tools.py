"""Tools of a request: what is refused, and what changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from serve_app.text.call_forms import HERMES
from tests.serve_app.asking import CHAT, chat, refused
from tests.serve_app.text_backend import TextBackend

TOOL = {"type": "function", "function": {"name": "f"}}
BIG = {"type": "function", "function": {"name": "f", "parameters": {"enum": [1] * 100_000}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({"tools": tools}, "tools") for tools in (1, {}, [1], [{}], [TOOL] * 129, [TOOL, TOOL])],
        ({"tools": [BIG]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        *[
            ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {"type": v}}}]}, "tools")
            for v in ("x", "string", ["object", "null"], None)
        ],
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": TOOL}, "tool_choice"),
        *[
            ({"chat_template_kwargs": value}, "chat_template_kwargs")
            for value in (
                *(1, [], "a", {"chat_template": "x"}, {"messages": []}, {"tools": []}),
                {"a": [1] * 100_000},
            )
        ],
        *[({"tools": [TOOL], "tool_choice": v}, "tool_choice") for v in ("f", 1, {}, ["auto"])],
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        *[
            ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": value}},
             "tool_choice")
            for value in (
                *(None, [], {}, {"mode": "required", "tools": []}),
                {"mode": "none", "tools": [TOOL]},
                {"mode": "auto", "tools": ["f"]},
                {"mode": "auto", "tools": [TOOL, {"type": "function", "function": {"name": "g"}}]},
            )
        ],
        ({"tools": [TOOL], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"tools": [TOOL], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [TOOL], "min_tokens": 2}, "min_tokens"),
        *[
            ({"messages": [{"role": "assistant", "tool_calls": calls}]}, "messages")
            for calls in (
                1,
                [{"id": "1"}],
                [{"id": "1", "function": {"name": 1, "arguments": "{}"}}],
                [{"id": "1", "function": {"name": "f", "arguments": "{" * 100_000}}],
            )
        ],
    ],
)  # fmt: skip
def test_bad_tools_are_refused(
    http: httpx.Client, backend: TextBackend, fields: dict[str, Any], param: str
) -> None:
    backend.model_ = replace(backend.model_, max_model_len=2000)
    error = refused(http.post(CHAT, json=chat(**fields)))
    assert "[" not in error["param"], "a name of ours, not of a validator"
    assert error["param"].split(".")[0] == param


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        *[(value, "{}") for value in (None, "", " \n", "{}", {})],
        *[(text, text) for text in ('{"a": "', "[]", "null", '{"a": NaN}', '{"a": "\\ud83d"}')],
        ({"a": "é"}, '{"a": "é"}'),
        ([], "[]"),
    ],
)
def test_arguments_in_history_are_whatever_a_model_wrote(
    http: httpx.Client, backend: TextBackend, arguments: object, shown: str
) -> None:
    """The answer to a call that was cut is sent back as it was."""
    backend.model_ = replace(backend.model_, max_model_len=2000)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "hot?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "20 degrees"},
    ]
    reply = http.post(CHAT, json=chat(messages=turns, max_tokens=1))
    assert reply.status_code == 200, reply.text
    prompt = bytes(backend.generations[0].prompt_ids).decode()
    assert prompt == "hot?" + HERMES.written("f", shown) + "20 degrees"


def test_a_fault_of_a_call_is_told_alone(http: httpx.Client) -> None:
    turns = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    error = refused(http.post(CHAT, json=chat(messages=turns)))
    assert error["param"] == "messages.0.tool_calls.0.function"
    assert "content" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"guided_regex": "a"}, "guided_regex"), ({"tools": [TOOL]}, "tools")],
)
def test_a_model_that_cannot_follow_grammars_says_so(
    http: httpx.Client, backend: TextBackend, fields: dict[str, Any], param: str
) -> None:
    backend.model_ = replace(backend.model_, max_model_len=2000, grammars=False)
    error = refused(http.post(CHAT, json=chat(**fields)))
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert http.post(CHAT, json=chat()).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"tools": None, "tool_choice": None},
        {"tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "none", "min_tokens": 1},
        {"tools": [TOOL], "parallel_tool_calls": False},
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [TOOL]},
            },
        },
    ],
)
def test_tools_that_change_nothing_are_served(
    http: httpx.Client, backend: TextBackend, fields: dict[str, Any]
) -> None:
    backend.model_ = replace(backend.model_, max_model_len=2000)
    backend.skip_until = "hello"
    reply = http.post(CHAT, json=chat(**fields))
    message = reply.json()["choices"][0]["message"]
    assert "tool_calls" not in message
    assert message["content"] == "hello"


@pytest.mark.parametrize("where", ["tools", "response_format"])
@pytest.mark.parametrize("key", ["items", "properties", "anyOf"])
@pytest.mark.parametrize("depth", [10, 55, 90, 180])
def test_deeply_nested_schemas_do_no_harm(
    http: httpx.Client, backend: TextBackend, where: str, key: str, depth: int
) -> None:
    """Taken, or refused as a bad request."""
    backend.model_ = replace(backend.model_, max_model_len=20_000)
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {key: {"items": schema, "properties": {"a": schema}, "anyOf": [schema]}[key]}
    schema = {"type": "object", "properties": {"a": schema}}
    fields: Any = {
        "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
        "response_format": {
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}
        },
    }[where]
    reply = http.post(CHAT, json=chat(**fields, max_tokens=1))
    assert reply.status_code in (200, 400), reply.text
    assert reply.status_code == 200 or depth > 20

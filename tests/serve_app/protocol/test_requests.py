from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from serve_app.protocol.conversation import CalledFunction, Function, Message, Tool, ToolCall
from serve_app.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)

TURN = {"role": "user", "content": "x"}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [TURN], **fields})


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, ()),
        ([], ()),
        ("a", ("a",)),
        (["b", "a", "b"], ("b", "a")),
        (["a" * 256], ("a" * 256,)),
    ],
)
def test_stops_become_a_tuple(stop: object, expected: tuple[str, ...]) -> None:
    """C25."""
    assert chat(stop=stop).stop == expected


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], list("abcde"), "a" * 257, [1], {"a": 1}, 1])
def test_bad_stops_are_refused(stop: object) -> None:
    """C25."""
    with pytest.raises(ValidationError):
        chat(stop=stop)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_become_a_list(prompt: object, expected: list[object]) -> None:
    """R17."""
    assert CompletionRequest.model_validate({"model": "m", "prompt": prompt}).prompt == expected


@pytest.mark.parametrize(
    "content",
    [None, 5, [], {}, [{"type": "text"}], [{"type": "text", "text": 5}], ["a"], [{"text": "a"}]],
)
def test_bad_contents_are_refused(content: object) -> None:
    with pytest.raises(ValidationError, match=r"messages\.0\.content"):
        chat(messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize("role", ["function", "User", "", None, 5])
def test_bad_roles_are_refused(role: object) -> None:
    with pytest.raises(ValidationError, match=r"messages\.0\.role"):
        chat(messages=[{"role": role, "content": "x"}])


def test_further_fields_of_a_message_are_accepted() -> None:
    message = {**TURN, "name": "me", "refusal": None, "tool_calls": []}
    assert chat(messages=[message]).messages[0].content == "x"


def test_only_the_first_bad_message_is_told() -> None:
    """C26."""
    with pytest.raises(ValidationError) as caught:
        chat(messages=[{"role": "user", "content": 5}] * 1000)
    assert caught.value.error_count() == 1


GOOD: dict[type[BaseModel], dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [TURN]},
    CompletionRequest: {"model": "m", "prompt": "x"},
    TokenizeRequest: {"model": "m", "prompt": "x"},
    DetokenizeRequest: {"model": "m", "tokens": [1]},
    StreamOptions: {},
    Message: TURN,
    ToolCall: {"function": {"name": "f", "arguments": "{}"}},
    CalledFunction: {"name": "f"},
    Tool: {"type": "function", "function": {"name": "f"}},
    Function: {"name": "f"},
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, good in GOOD.items() for name in kind.model_fields if name not in good],
)
def test_null_means_the_default(kind: type[BaseModel], name: str) -> None:
    """Of every field that may be left out."""
    made = kind.model_validate_json(json.dumps(GOOD[kind] | {name: None}))
    default = getattr(kind.model_validate(GOOD[kind]), name)
    assert getattr(made, name) == default or (kind, name) == (ToolCall, "type")


@pytest.mark.parametrize("kind", ["text", "json_object", "json_schema"])
def test_a_schema_of_the_wrong_place_may_be_null(kind: str) -> None:
    schema = {"type": "object", "properties": {}}
    asked = {"type": kind, "json_schema": {"name": "x", "strict": None, "schema": schema}}
    with_null = chat(response_format={**asked, "schema": None})
    assert with_null.response_format == chat(response_format=asked).response_format


def test_unknown_fields_are_those_that_nobody_defines() -> None:
    """R19."""
    request = chat(max_token=1, store=True, metadata={}, logprobs=False, tools=None, user="me")
    assert request.unknown_fields() == ["max_token"]


def test_usage_is_asked_for_by_an_option() -> None:
    """C17."""
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert not chat(stream=True).include_usage

"""Tools: calls read from text however it is cut, and as the real client sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.tool_calls import MARK, CallDelta, ToolCallReader, written
from tests.serve_app.asking import chat
from tests.serve_app.text import TextBackend

ARGUMENTS = ["{}", '{"city": "Köln <tool_call> }", "n": [1, {"a": "}\\n</tool_call>"}]}']
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def joined(parts: list[tuple[str, list[CallDelta]]]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments) of each call."""
    calls: list[list[str]] = []
    for _, deltas in parts:
        for delta in deltas:
            if delta.name is not None:
                assert delta.id is not None
                assert delta.number == len(calls)
                calls.append([delta.name, ""])
            calls[delta.number][1] += delta.arguments
    return "".join(content for content, _ in parts), [(name, args) for name, args in calls]


@given(
    st.sampled_from(["", "Let me see. ", "a < b <tool", "日本\n"]),
    st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), st.sampled_from(ARGUMENTS))),
    st.randoms(),
)
def test_calls_are_read_however_the_text_is_cut(
    content: str, calls: list[tuple[str, str]], rng: Any
) -> None:
    text = content + "\n".join(written(name, arguments) for name, arguments in calls)
    reader, parts, at = ToolCallReader(), [], 0
    while at < len(text):
        size = rng.randint(1, 9)
        parts.append(reader.push(text[at : at + size], last=False))
        at += size
    parts.append(reader.push("", last=True))
    assert joined(parts) == (content, calls)
    assert all(delta.id or delta.arguments for _, deltas in parts for delta in deltas)


def test_what_comes_at_once_of_a_call_is_one_delta() -> None:
    text = written("f", '{"a": 1}') + "\n" + written("g", "{}")
    _, deltas = ToolCallReader().push(text, last=True)
    assert [(delta.name, delta.arguments) for delta in deltas] == [("f", '{"a": 1}'), ("g", "{}")]


def test_content_is_held_back_only_where_a_mark_may_begin() -> None:
    reader = ToolCallReader()
    assert reader.push("a <b", last=False) == ("a <b", [])
    assert reader.push(" <tool", last=False) == (" ", [])
    assert reader.push("box", last=False) == ("<toolbox", [])


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_call_that_the_limit_cuts_is_told_as_far_as_it_goes(cut: int) -> None:
    text = written("f", '{"a": "b"}')[:cut]
    content, calls = joined([ToolCallReader().push(text, last=True)])
    assert content == (text if len(text) < len(MARK) else "")
    assert all(name == "f" and '{"a": "b"}}\n</tool_call>'.startswith(a) for name, a in calls)


@pytest.mark.parametrize("per_delta", [1, 7, 500])
@pytest.mark.parametrize("lead", ["", "I look. "])
def test_the_client_gets_calls_plain_and_streamed(
    client: openai.OpenAI, backend: TextBackend, per_delta: int, lead: str
) -> None:
    backend.per_delta = per_delta
    arguments = '{"city": "Bonn"}'
    text = lead + written("weather", arguments) + "\n" + written("weather", "{}")
    turns = [{"role": "user", "content": text}]
    body = chat(messages=turns, tools=[WEATHER], max_tokens=400)
    # The prompt begins with the instructions, which this backend would repeat.
    backend.skip_until = text
    backend.model_ = replace(backend.model_, max_model_len=2000)
    choice = client.chat.completions.create(**body).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == (lead or None)
    made = choice.message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in made] == [
        ("weather", arguments),
        ("weather", "{}"),
    ]
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert (final.message.content or "") == lead
    streamed = final.message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in streamed] == [
        (c.function.name, c.function.arguments) for c in made
    ]
    assert len({call.id for call in [*made, *streamed]}) == 4


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("{}", "{}"), ("", "{}"), (" \n", "{}"), ('{"a":"\\u00e9"}', '{"a": "é"}')],
)
def test_templates_without_tools_get_instructions(
    client: openai.OpenAI, backend: TextBackend, arguments: str, shown: str
) -> None:
    """And earlier calls as text, as an answer would write them."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "hot?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "20 degrees"},
    ]
    backend.model_ = replace(backend.model_, max_model_len=2000)
    client.chat.completions.create(**chat(messages=turns, tools=[WEATHER], max_tokens=1))
    prompt = bytes(backend.generations[0].prompt_ids).decode()
    assert json.dumps(WEATHER["function"]["name"]) in prompt
    assert prompt.endswith("hot?" + written("weather", shown) + "20 degrees")

"""Tools: calls read from text however it is cut, and as the real client sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.http.choices import Piece
from serve_app.http.formats import ChatFormat, ShownLogprobs
from serve_app.http.replies import PromptDetails, Reply, Usage
from serve_app.protocol.conversation import Message
from serve_app.text.call_forms import HERMES
from serve_app.text.detokenizer import detokenizers
from serve_app.text.sequence_text import Ending, SequenceText
from serve_app.text.token_texts import TokenTexts
from serve_app.text.tool_calls import CallDelta, ToolCallReader
from tests.serve_app.asking import CHAT, chat
from tests.serve_app.sse import events as sse_events
from tests.serve_app.streams import stream
from tests.serve_app.text_backend import TextBackend, byte_tokenizer

NEW_DETOKENIZER = detokenizers(byte_tokenizer().backend_tokenizer)
TEXTS = TokenTexts(byte_tokenizer().backend_tokenizer)
USAGE = Usage(3, 4, 7, PromptDetails(1))

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
    text = content + "\n".join(HERMES.written(name, arguments) for name, arguments in calls)
    reader, parts, at = ToolCallReader(), [], 0
    while at < len(text):
        size = rng.randint(1, 9)
        parts.append(reader.push(text[at : at + size], last=False))
        at += size
    parts.append(reader.push("", last=True))
    assert joined(parts) == (content, calls)
    assert all(delta.id or delta.arguments for _, deltas in parts for delta in deltas)


def test_what_comes_at_once_of_a_call_is_one_delta() -> None:
    text = HERMES.written("f", '{"a": 1}') + "\n" + HERMES.written("g", "{}")
    _, deltas = ToolCallReader().push(text, last=True)
    assert [(delta.name, delta.arguments) for delta in deltas] == [("f", '{"a": 1}'), ("g", "{}")]


def test_content_is_held_back_only_where_a_mark_may_begin() -> None:
    reader = ToolCallReader()
    assert reader.push("a <b", last=False) == ("a <b", [])
    assert reader.push(" <tool", last=False) == (" ", [])
    assert reader.push("box", last=False) == ("<toolbox", [])


def of_message(message: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments) of each call."""
    called = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"] or "", [(c["name"], c["arguments"]) for c in called]


def of_chunks(chunks: list[Any]) -> tuple[str, list[tuple[str, str]], str]:
    """The same of a stream, and its finish reason."""
    content, calls, ending = "", [], ""
    for choice in (chunk["choices"][0] for chunk in chunks if chunk != "[DONE]"):
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        ending = choice["finish_reason"] or ending
    return content, [(name, arguments) for name, arguments in calls], ending


LEAD = "I look. "
CALLS = [("f", ARGUMENTS[1]), ("get_weather", '{"n": {"a": {}}}')]
SAID = LEAD + "\n".join(HERMES.written(*call) for call in CALLS)


@pytest.mark.parametrize("cut", range(len(SAID.encode()) + 1))
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_an_answer_may_end_at_any_token(cut: int, reason: Ending) -> None:
    """Arguments hold nothing of what is written around them, and only calls that can be made are
    told to be: whole and streamed alike."""
    ids, pieces = tuple(SAID.encode()[:cut]), []
    text = SequenceText(NEW_DETOKENIZER(True), include_stop=True)
    for place, token in enumerate(ids):
        last = place == len(ids) - 1
        pieces.append(Piece(0, *text.read((token,), reason if last else None)))
    if not ids:
        pieces = [Piece(0, "", reason)]
    shape = partial(ChatFormat, ShownLogprobs(TEXTS), new_caller=ToolCallReader)
    body = json.loads(Reply(shape(), "m").whole(pieces, [()], USAGE))["choices"][0]
    content, calls = of_message(body["message"])
    assert Message.model_validate_json(json.dumps(body["message"])), "it is taken back"
    assert LEAD.startswith(content[: len(LEAD)])
    assert HERMES.mark.startswith(content[len(LEAD) :])
    for (name, arguments), (said_name, said) in zip(calls, CALLS, strict=False):
        assert (name, said.startswith(arguments.rstrip("\ufffd"))) == (said_name, True)
    for whole, before in zip(CALLS, calls[:-1], strict=False):
        assert before == whole
    is_complete = bool(calls) and calls[-1][1] == CALLS[len(calls) - 1][1]
    expected = "tool_calls" if is_complete and reason == "stop" else reason
    assert body["finish_reason"] == expected

    events = Reply(shape(), "m").events(include_usage=False)
    sent = b"".join(events.pieces([piece]) for piece in pieces) + events.closing(USAGE)
    assert of_chunks(sse_events(sent.decode())) == (content, calls, expected)


@pytest.mark.parametrize("cut", range(len(HERMES.mark)))
def test_half_a_mark_is_content_only_where_there_may_be_some(cut: int) -> None:
    said = HERMES.mark[:cut]
    assert ToolCallReader().push(said, last=True) == (said, [])
    assert ToolCallReader(only_calls=True).push(said, last=True) == ("", [])


LOCATION = '{"location": "Paris"}'
WRITTEN = HERMES.written("weather", LOCATION)


@pytest.mark.parametrize(
    ("fields", "arguments", "ending"),
    [
        ({"stop": ["</tool_call>"]}, LOCATION, "tool_calls"),
        ({"stop": ["}\n"]}, LOCATION, "tool_calls"),
        ({"stop": ["\n</"], "include_stop_str_in_output": True}, LOCATION, "tool_calls"),
        ({"stop_token_ids": [ord("}")]}, LOCATION[:-1], "stop"),
        ({"stop": ["Paris"]}, '{"location": "', "stop"),
        ({"stop": ["Paris"], "include_stop_str_in_output": True}, LOCATION[:-2], "stop"),
        *(
            ({"max_tokens": len(WRITTEN) - less}, LOCATION, "length")
            for less in range(len(HERMES.end))
        ),
        ({"max_tokens": len(WRITTEN) - len(HERMES.end) - 1}, LOCATION[:-1], "length"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("per_delta", [1, 500])
def test_nothing_of_what_surrounds_a_call_is_told(
    http: httpx.Client,
    backend: TextBackend,
    fields: dict[str, Any],
    arguments: str,
    ending: str,
    per_delta: int,
) -> None:
    """And the answer, sent back as it is, is taken."""
    backend.model_ = replace(backend.model_, max_model_len=2000)
    backend.skip_until, backend.per_delta = WRITTEN, per_delta
    fields = {"max_tokens": 400} | fields
    body = chat(messages=[{"role": "user", "content": WRITTEN}], tools=[WEATHER], **fields)
    choice = http.post(CHAT, json=body).json()["choices"][0]
    expected = ("", [("weather", arguments)], ending)
    assert (*of_message(choice["message"]), choice["finish_reason"]) == expected
    assert of_chunks(stream(http, CHAT, body)) == expected

    result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"]}
    turns = [*body["messages"], choice["message"], {**result, "content": "hot"}]
    backend.skip_until = ""
    reply = http.post(CHAT, json=body | {"messages": turns})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("per_delta", [1, 7, 500])
@pytest.mark.parametrize("lead", ["", "I look. "])
def test_the_client_gets_calls_plain_and_streamed(
    client: openai.OpenAI, backend: TextBackend, per_delta: int, lead: str
) -> None:
    backend.per_delta = per_delta
    arguments = '{"city": "Bonn"}'
    text = lead + HERMES.written("weather", arguments) + "\n" + HERMES.written("weather", "{}")
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
    assert prompt.endswith("hot?" + HERMES.written("weather", shown) + "20 degrees")

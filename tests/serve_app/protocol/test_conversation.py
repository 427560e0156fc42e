"""Whatever an answer can hold is taken back as history, with what clients add to it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.http.choices import Piece
from serve_app.http.formats import ChatFormat, ShownLogprobs
from serve_app.http.replies import PromptDetails, Reply, Usage
from serve_app.protocol.requests import ChatRequest
from serve_app.text.call_forms import HERMES
from serve_app.text.chat import PromptEncoder
from serve_app.text.reasoning import ReasoningTags
from serve_app.text.token_texts import TokenTexts
from serve_app.text.tool_calls import ToolCallReader
from tests.serve_app.asking import chat
from tests.serve_app.sse import events
from tests.serve_app.text.test_tool_calls import WEATHER
from tests.serve_app.text_backend import TextBackend, byte_tokenizer

TEXTS = TokenTexts(byte_tokenizer().backend_tokenizer)
USAGE = Usage(3, 4, 7, PromptDetails(1))
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
"""Takes arguments for an object, as templates do."""
SAID = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | SAID,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SAID, inner, max_size=3),
    max_leaves=8,
)
CALL = st.builds(
    lambda name, arguments: HERMES.written(name, json.dumps(arguments)),
    st.sampled_from(["f", "get_weather"]),
    st.dictionaries(SAID, JSON, max_size=3),
)
NULLS = ["refusal", "name", "function_call", "audio", "reasoning_content", "reasoning", "parsed"]
MORE = st.fixed_dictionaries(
    {},
    optional={name: st.none() for name in NULLS}
    | {"annotations": st.just([]), "tool_calls": st.sampled_from([None, []])},
)
"""What clients write beside it."""


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Thoughts, content and calls, or a beginning of that."""
    thoughts = draw(st.sampled_from(["", "<think>{}</think>"])).format(draw(SAID))
    text = thoughts + draw(SAID) + "\n".join(draw(st.lists(CALL, max_size=3)))
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


def shape() -> ChatFormat:
    return ChatFormat(ShownLogprobs(TEXTS), new_caller=ToolCallReader, reasoning=ReasoningTags())


def accumulated(chunks: list[Any]) -> dict[str, Any]:
    """A stream's message as clients put it together, index and all."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks if chunk != "[DONE]"):
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append(call)
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return message


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What a client says to each call of a message."""
    ids = [call["id"] for call in message.get("tool_calls") or ()]
    return [{"role": "tool", "tool_call_id": call_id, "content": "hot"} for call_id in ids]


@pytest.mark.parametrize("template", [None, WITH_TOOLS], ids=["instructions", "native"])
def test_an_answer_is_taken_back(template: str | None) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    encoder = PromptEncoder(tokenizer)
    write = partial(encoder.chat, max_model_len=100_000)

    @settings(max_examples=100, deadline=None)
    @given(answers(), st.sampled_from(["stop", "length"]), MORE)
    def check(text: str, ending: Any, more: dict[str, Any]) -> None:
        pieces = [Piece(0, text[at : at + 5], None) for at in range(0, len(text), 5)]
        pieces.append(Piece(0, "", ending))
        whole = json.loads(Reply(shape(), "m").whole(pieces, [()], USAGE))["choices"][0]["message"]
        writer = Reply(shape(), "m").events(include_usage=False)
        streamed = writer.pieces(pieces) + writer.closing(USAGE)
        for message in (whole, accumulated(events(streamed.decode()))):
            turns = [{"role": "user", "content": "hi"}, more | message, *results(message)]
            body = ChatRequest.model_validate_json(json.dumps(chat(messages=turns)))
            asyncio.run(write(body.messages))

    check()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 15, 40, 60, 400])
def test_the_client_sends_back_what_it_got(
    client: openai.OpenAI, backend: TextBackend, streamed: bool, max_tokens: int
) -> None:
    backend.model_ = replace(backend.model_, max_model_len=4000)
    backend.skip_until = text = "So. " + HERMES.written("weather", '{"city": "Bonn"}')
    body = chat(tools=[WEATHER], max_tokens=max_tokens)
    turns: list[Any] = [{"role": "user", "content": text}]
    for _ in range(3):
        if streamed:
            with client.chat.completions.stream(**body | {"messages": turns}) as stream:
                for _event in stream:
                    pass
                message = stream.current_completion_snapshot.choices[0].message.model_dump()
        else:
            made = client.chat.completions.create(**body | {"messages": turns})
            message = made.choices[0].message.model_dump()
        turns += [message, *results(message)]
    assert len(turns) >= 4


@pytest.mark.parametrize("role", ["assistant", "tool"])
@pytest.mark.parametrize("content", [None, [], ""])
def test_an_answer_and_a_result_may_say_nothing(role: str, content: object) -> None:
    body = chat(messages=[{"role": "user", "content": "a"}, {"role": role, "content": content}])
    assert ChatRequest.model_validate_json(json.dumps(body)).messages[1].content == ""


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("value", [None, "I think.", 1, {"effort": "low"}, [{"type": "text"}]])
def test_thoughts_are_a_text_and_all_else_is_ignored(name: str, value: object) -> None:
    body = chat(messages=[{"role": "assistant", "content": "a", name: value}])
    message = ChatRequest.model_validate_json(json.dumps(body)).messages[0]
    assert getattr(message, name) == (value if isinstance(value, str) else None)


def test_an_answer_may_have_made_more_calls_than_there_are_tools() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call] * 200}])
    made = ChatRequest.model_validate_json(json.dumps(body)).messages[0].tool_calls
    assert len(made or ()) == 200

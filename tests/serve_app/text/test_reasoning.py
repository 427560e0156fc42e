"""Thoughts apart from what is said, however the text is cut, and as the real client sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from serve_app.text.call_forms import HERMES
from serve_app.text.reasoning import ReasoningReader, ReasoningTags
from tests.serve_app.asking import chat
from tests.serve_app.conftest import KEY, LIMITS, Site, serve
from tests.serve_app.text.test_tool_calls import WEATHER
from tests.serve_app.text_backend import TextBackend

TAGS = ReasoningTags()
CASES = [
    # text, whether the prompt has begun the thoughts, thoughts, content
    ("<think>\n1 < 2 </thin \n\n</think>\n\nYes", False, "1 < 2 </thin", "Yes"),
    ("\n<think>a</think>b</think>", False, "a", "b</think>"),
    ("a</think>\n b ", True, "a", "b "),
    ("<think></think>b", False, "", "b"),
    (" plain <think>", False, "", " plain <think>"),
    ("<thin", False, "", "<thin"),
    ("cut short \n", True, "cut short \n", ""),
    ("<think>", False, "", ""),
    ("", False, "", ""),
]  # fmt: skip


@given(st.sampled_from(CASES), st.randoms())
def test_thoughts_are_split_off_however_the_text_is_cut(
    case: tuple[str, bool, str, str], rng: Any
) -> None:
    text, is_open, thoughts, content = case
    reader, got, at = ReasoningReader(TAGS, is_open=is_open), ["", ""], 0
    while at <= len(text):
        size = rng.randint(1, 7)
        parts = reader.push(text[at : at + size], last=at + size > len(text))
        got = [sofar + part for sofar, part in zip(got, parts, strict=True)]
        at += size
    assert got == [thoughts, content]


def test_a_prompt_may_begin_the_thoughts() -> None:
    assert TAGS.is_open("<|assistant|><think>\n")
    assert not TAGS.is_open("<think>\n\n</think>\n\n")


@pytest.fixture(scope="module")
def thinking(tokenizer: PreTrainedTokenizerFast) -> Iterator[Site]:
    with serve(TextBackend(), tokenizer, LIMITS, reasoning=TAGS) as site:
        yield site


@pytest.mark.parametrize("per_delta", [1, 5, 500])
@pytest.mark.parametrize("calls", [False, True])
def test_the_client_gets_them_apart(thinking: Site, per_delta: int, calls: bool) -> None:
    said = "It is" + HERMES.written("weather", "{}") if calls else "It is warm."
    text = f"<think>\nHm. {HERMES.written('weather', '{}')}\n</think>\n\n{said}"
    backend = thinking.backend
    backend.reset()
    backend.per_delta, backend.skip_until = per_delta, text
    backend.model_ = replace(backend.model_, max_model_len=2000)
    body = chat(messages=[{"role": "user", "content": text}], max_tokens=500)
    if calls:
        body["tools"] = [WEATHER]
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key=KEY) as client:
        message = client.chat.completions.create(**body).choices[0].message
        thoughts, content, made = "", "", 0
        for chunk in client.chat.completions.create(**body, stream=True):
            delta = chunk.choices[0].delta
            thoughts += (delta.model_extra or {}).get("reasoning_content") or ""
            content += delta.content or ""
            made += len([call for call in delta.tool_calls or [] if call.id])
    assert (message.model_extra or {})["reasoning_content"] == thoughts
    assert thoughts == f"Hm. {HERMES.written('weather', '{}')}"
    assert message.content == content == ("It is" if calls else "It is warm.")
    assert len(message.tool_calls or []) == made == calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({"response_format": {"type": "json_object"}}, True),
        ({"tools": [WEATHER], "tool_choice": "required"}, True),
        ({"tools": [WEATHER]}, False),
        ({}, False),
    ],
    ids=str,
)
def test_where_the_template_begins_thoughts_a_form_leaves_no_room_for_them(
    thinking: Site, fields: dict[str, Any], bound: bool, stream: bool
) -> None:
    """A grammar never gets to the end of the thoughts: its answer would be taken for one."""
    backend = thinking.backend
    backend.reset()
    backend.skip_until = "{}"
    backend.model_ = replace(backend.model_, max_model_len=2000)
    opening = [{"role": "user", "content": "{}"}, {"role": "assistant", "content": "<think>"}]
    body = chat(messages=opening, max_tokens=2, **fields)
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key=KEY) as client:
        if stream:
            chunks = client.chat.completions.create(**body, stream=True)
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            content = client.chat.completions.create(**body).choices[0].message.content or ""
    assert content == ("{}" if bound else "")


def test_other_models_say_everything(client: openai.OpenAI) -> None:
    text = "<think>a</think>b"
    body = chat(messages=[{"role": "user", "content": text}])
    message = client.chat.completions.create(**body).choices[0].message
    assert message.content == text
    assert "reasoning_content" not in (message.model_extra or {})

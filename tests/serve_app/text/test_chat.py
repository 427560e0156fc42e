from __future__ import annotations

import asyncio
import threading
from typing import Any

import jinja2
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from serve_app.protocol.conversation import Function, Message
from serve_app.protocol.errors import ApiError
from serve_app.text.chat import INLINE_CHARS, PromptEncoder
from tests.serve_app.text_backend import byte_tokenizer

ALL = "{% for message in messages %}{{ message.content }}{% endfor %}"


def message(content: Any, role: str = "user") -> Message:
    return Message.model_validate({"role": role, "content": content})


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerFast) -> PromptEncoder:
    return PromptEncoder(tokenizer)


async def test_a_conversation_is_written_by_the_template(
    smollm2: PreTrainedTokenizerFast,
) -> None:
    turns = [message("Be brief.", "developer"), message("Hi"), message("Yes?", "assistant")]
    _, ids = await PromptEncoder(smollm2).chat([*turns, message("日本")], 1000)
    assert smollm2.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\n日本<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_text_parts_are_lines(encoder: PromptEncoder) -> None:
    """So is what an earlier answer refused with."""
    parts = [{"type": "text", "text": "one"}, {"type": "refusal", "refusal": "two"}]
    assert (await encoder.chat([message(parts, "assistant")], 100))[1] == tuple(b"one\ntwo")


async def test_without_a_template_there_is_no_chat() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    encoder = PromptEncoder(tokenizer)
    with pytest.raises(ApiError, match="no chat template"):
        await encoder.chat([message("hi")], 100)
    assert await encoder.text("hi", 100) == tuple(b"hi")


async def test_no_request_pays_for_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: the template is compiled before the first request."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ALL + "{# not compiled before this test #}"
    encoder = PromptEncoder(tokenizer)

    def compile_now(*_: object, **__: object) -> None:
        raise AssertionError("compiled in a request")

    monkeypatch.setattr(jinja2.Environment, "compile", compile_now)
    assert (await encoder.chat([message("hi")], 100))[1] == tuple(b"hi")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """In which work was done that could have been done on the event loop."""
    threads: list[threading.Thread] = []
    to_thread = asyncio.to_thread

    async def noted(call: Any) -> Any:
        def run() -> Any:
            threads.append(threading.current_thread())
            return call()

        return await to_thread(run)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    return threads


@pytest.mark.parametrize("length", [INLINE_CHARS, INLINE_CHARS + 1])
async def test_a_long_text_leaves_the_event_loop_free(
    encoder: PromptEncoder, threads: list[threading.Thread], length: int
) -> None:
    assert len(await encoder.text("a" * length, 10**6)) == length
    assert [thread is not threading.main_thread() for thread in threads] == [True] * (
        length > INLINE_CHARS
    )


CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("turns", "more"),
    [
        ([message("a")] * 100, {}),
        ([message("a" * INLINE_CHARS)], {}),
        ([Message.model_validate({"role": "assistant", "tool_calls": [CALL]})], {}),
        ([message("a")], {"tools": [Function(name="f")]}),
        ([message("a")], {"variables": {"a": [1]}}),
    ],
    ids=["many", "long", "calls", "tools", "variables"],
)
async def test_a_large_conversation_leaves_the_event_loop_free(
    encoder: PromptEncoder, threads: list[threading.Thread], turns: list[Message], more: Any
) -> None:
    """Templates are slow, and a neighbour's stream waits for whoever holds the loop."""
    await encoder.chat([message("a")] * 10, 10**6)
    assert threads == []
    await encoder.chat(turns, 10**6, **more)
    assert threads
    assert threading.main_thread() not in threads


async def test_what_is_far_too_long_is_refused_without_tokenising(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest token of this vocabulary has five characters: <pad>."""

    async def never(*_: object) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(asyncio, "to_thread", never)
    with pytest.raises(ApiError, match="at least 2000 tokens"):
        await encoder.text("a" * 10_000, 1999)


async def test_special_tokens_of_clients_are_counted_before_they_are_tokenised(
    encoder: PromptEncoder,
) -> None:
    """Each is a part of its own, and parts take time, however short."""
    with pytest.raises(ApiError, match="at least 3000 tokens"):
        await encoder.chat([message("</s>" * 3000)], 2999)


async def test_special_tokens_surround_a_text_and_not_a_conversation() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 256)]
    )
    encoder = PromptEncoder(tokenizer)
    assert await encoder.text("a", 10) == (256, 97)
    assert (await encoder.chat([message("a")], 10))[1] == (97,)


async def test_a_tokenizer_that_truncates_is_cured() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    assert len(await PromptEncoder(tokenizer).text("abcdef", 10)) == 6


def test_the_vocabulary_includes_added_tokens(encoder: PromptEncoder) -> None:
    """C22."""
    assert encoder.vocab_size == 258


async def test_variables_reach_the_template() -> None:
    changed = byte_tokenizer()
    changed.chat_template = ALL + "{{ '!' if loud else '.' }}"
    encoder = PromptEncoder(changed)
    assert (await encoder.chat([message("hi")], 100))[0] == "hi."
    assert (await encoder.chat([message("hi")], 100, (), {"loud": True}))[0] == "hi!"

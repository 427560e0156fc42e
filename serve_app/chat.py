"""Texts and conversations to token ids.

The tokenizer's own chat template writes the prompt. The module knows neither HTTP nor how an
answer is made; what it refuses, it refuses with an `ApiError`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerFast

from serve_app.conversation import CalledFunction, Function, Message
from serve_app.errors import invalid, too_long
from serve_app.special_tokens import SpecialTokens
from serve_app.tool_calls import instructions, written

Turns: TypeAlias = "list[dict[str, Any]]"
"""A conversation as templates expect it."""

logger = logging.getLogger(__name__)

INLINE_CHARS = 4096
"""A longer text is written and tokenised in a thread: the event loop serves other streams
meanwhile."""
INLINE_TURN = 100
"""Characters that take as long to write as a turn does by itself."""


class PromptEncoder:
    """Makes prompts of one model. Safe to use from many requests at once.

    The chat template is compiled and run once here, so that no request pays for it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab()
        self.vocab_size: int = max(vocabulary.values()) + 1
        """Ids at or above it have no text."""
        self._longest_token = max(len(token.encode()) for token in vocabulary)
        self._special = SpecialTokens(self._backend)
        self._knows_tools = False
        """The chat template writes tools and calls by itself."""
        self._warm_up()

    def _warm_up(self) -> None:
        if self._tokenizer.chat_template is None:
            return
        turns: Turns = [{"role": "user", "content": "warm up"}]
        try:
            self._render(turns)
            tool = {"name": "knows_tools", "description": "", "parameters": {}}
            text = self._render(turns, [{"type": "function", "function": tool}])
            self._knows_tools = "knows_tools" in text
        except Exception:
            logger.warning("the chat template refuses a plain user message", exc_info=True)

    async def chat(
        self,
        messages: Sequence[Message],
        max_model_len: int,
        tools: Sequence[Function] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[str, tuple[int, ...]]:
        """Text and ids of the conversation and the opening of the answer, which may call the
        tools. variables: of the chat template. Special tokens in what the client wrote are text.

        Raises ApiError if there is no template, if it refuses the conversation, or if the
        prompt cannot fit into `max_model_len` tokens.
        """
        if self._tokenizer.chat_template is None:
            raise invalid("This model has no chat template; use /v1/completions.", "messages")
        write = partial(self._write, messages, tools, variables)
        plain = not (tools or variables or any(turn.tool_calls for turn in messages))
        if plain and sum(INLINE_TURN + len(turn.content) for turn in messages) <= INLINE_CHARS:
            text = write()
        else:
            text = await asyncio.to_thread(write)
        encode = partial(self._special.encode, text)
        text = self._special.without_marks(text)
        return text, await self._encode(text, encode, max_model_len, "messages")

    def _write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Function],
        variables: Mapping[str, Any],
    ) -> str:
        """The conversation by the template, with marks. Raises ApiError if that refuses it."""
        offered = [_described(tool) for tool in tools]
        try:
            if self._knows_tools:
                turns = [_native(turn) for turn in messages]
            else:
                turns, offered = _with_instructions(messages, offered), []
            return self._render(*self._special.mark([turns, offered, variables]))
        except Exception:
            # A template is code of the model's authors, and raises whatever it likes.
            message = "The chat template of this model refuses the conversation."
            raise invalid(message, "messages") from None

    async def text(
        self, text: str, max_model_len: int, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Ids of a plain text, with the special tokens that the model expects around it.

        Raises ApiError if the prompt cannot fit into `max_model_len` tokens.
        """

        def encode() -> list[int]:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return ids

        return await self._encode(text, encode, max_model_len, "prompt")

    def bad_tokens(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens: as the start of a text, and behind other words."""
        spellings = [text for word in words for text in (word, " " + word.lstrip())]
        encoded = (self._backend.encode(text, add_special_tokens=False).ids for text in spellings)
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def _render(
        self,
        turns: Turns,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        text: Any = self._tokenizer.apply_chat_template(
            turns,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )
        return str(text)

    async def _encode(
        self, text: str, encode: Callable[[], list[int]], max_model_len: int, param: str
    ) -> tuple[int, ...]:
        # No token covers more bytes than the longest one does: what is far too long is refused
        # without the seconds that tokenising it would take.
        at_least = len(text) // self._longest_token
        if at_least > max_model_len:
            raise too_long(f"at least {at_least}", max_model_len, param)
        if len(text) > INLINE_CHARS:
            return tuple(await asyncio.to_thread(encode))
        return tuple(encode())


def _described(tool: Function) -> Mapping[str, Any]:
    """As templates expect it."""
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _native(turn: Message) -> dict[str, Any]:
    """For templates that know tools."""
    made: dict[str, Any] = {"role": _role(turn.role), "content": turn.content}
    if turn.tool_calls:
        calls = [call.function for call in turn.tool_calls]
        made["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": _as_object(c)}}
            for c in calls
        ]
    if turn.tool_call_id is not None:
        made["tool_call_id"] = turn.tool_call_id
    return made


def _with_instructions(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Turns:
    """For other templates: calls are text, and a system message says how to make them."""
    turns = [{"role": _role(turn.role), "content": _with_calls(turn)} for turn in messages]
    if tools:
        system = instructions(tools)
        if turns[0]["role"] == "system":
            turns[0]["content"] += "\n\n" + system
        else:
            turns.insert(0, {"role": "system", "content": system})
    return turns


def _with_calls(turn: Message) -> str:
    calls = [call.function for call in turn.tool_calls or ()]
    texts = [written(c.name, _as_text(c)) for c in calls]
    return "\n".join(filter(None, [turn.content, *texts]))


def _as_object(called: CalledFunction) -> dict[str, Any]:
    """Templates take arguments for an object; those of a call that was cut are none."""
    return called.arguments if isinstance(called.arguments, dict) else {}


def _as_text(called: CalledFunction) -> str:
    arguments = called.arguments
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _role(role: str) -> str:
    """Templates know the older name of a developer message."""
    return "system" if role == "developer" else role

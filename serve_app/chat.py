"""Texts and conversations to token ids.

The tokenizer's own chat template writes the prompt. The module knows neither HTTP nor how an
answer is made; what it refuses, it refuses with an `ApiError`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from replica.vocabulary import without_absent
from serve_app.call_forms import HERMES, CallForm
from serve_app.conversation import Function, Message
from serve_app.errors import invalid, too_long
from serve_app.special_tokens import SpecialTokens
from serve_app.templates import MAX_REASON, templates_of, told, variables_of
from serve_app.turns import turns_of

logger = logging.getLogger(__name__)

INLINE_CHARS = 4096
"""A longer text is written and tokenised in a thread: the event loop serves other streams
meanwhile."""
MAX_REFUSALS = 100
"""Different ones that are told in the log."""
MAX_LOGGED = 300
INLINE_TURN = 100
"""Characters that take as long to write as a turn does by itself."""


class PromptEncoder:
    """Makes prompts of one model. Safe to use from many requests at once.

    The chat template is compiled and run once here, so that no request pays for it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab()
        self.vocab_size: int = max(vocabulary.values()) + 1
        """Ids at or above it have no text."""
        self._longest_token = max(len(token.encode()) for token in vocabulary)
        self._special = SpecialTokens(self._backend)
        self._templates = templates_of(tokenizer)
        self._refusals: set[str] = set()
        """Told in the log."""

    def within(self, vocab_size: int) -> PromptEncoder:
        """One that writes no added token at or above `vocab_size`, but spells it."""
        encoder = copy(self)
        encoder._backend = Tokenizer.from_str(without_absent(self._backend.to_str(), vocab_size))
        encoder._special = SpecialTokens(encoder._backend)
        return encoder

    @property
    def call_form(self) -> CallForm:
        """How answers of this model call tools."""
        return self._templates[1].profile.form if self._templates else HERMES

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
        if self._templates is None:
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
        assert self._templates is not None
        plain, with_tools = self._templates
        template = with_tools if tools or any(turn.tool_calls for turn in messages) else plain
        try:
            turns = turns_of(messages, tools, template.profile)
            given = {**variables_of(tools, template.profile), **variables}
            return template.render(*self._special.mark([turns, given]))
        except Exception as error:
            # A template is code of the model's authors, and raises whatever it likes.
            raise invalid(self._refusal(error), "messages") from None

    def _refusal(self, error: Exception) -> str:
        """What the client is told; the log tells the rest, once."""
        logged = self._special.without_marks(f"{type(error).__name__}: {error}")[:MAX_LOGGED]
        if logged not in self._refusals and len(self._refusals) < MAX_REFUSALS:
            self._refusals.add(logged)
            logger.warning("the chat template has refused a conversation: %r", logged)
        reason = self._special.without_marks(told(error))[:MAX_REASON]
        message = "The chat template of this model refuses the conversation"
        return f"{message}: {reason}" if reason else f"{message}."

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

"""Texts and conversations to token ids.

The tokenizer's own chat template writes the prompt. The module knows neither HTTP nor how an
answer is made; what it refuses, it refuses with an `ApiError`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from replica.sampling.vocabulary import without_absent
from serve_app.protocol.conversation import Function, Message
from serve_app.protocol.errors import invalid, too_long
from serve_app.text.call_forms import HERMES, CallForm
from serve_app.text.special_tokens import SpecialTokens, encoded
from serve_app.text.templates import MAX_REASON, templates_of, told, variables_of
from serve_app.text.turns import turns_of
from serve_app.throttling.fair_work import Run, in_thread

logger = logging.getLogger(__name__)

INLINE_CHARS = 4096
"""A longer text is written and tokenised elsewhere: the event loop serves other streams
meanwhile."""
USUAL_CHARS = 8
"""Of a token, at most, in text as people write it; a text that needs more to fit is probed."""
PROBE_CHARS = 16 * 1024
CUT_TOKENS = 16
"""More than cutting a text in two adds to its tokens."""
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
        run: Run = in_thread,
    ) -> tuple[str, tuple[int, ...]]:
        """Text and ids of the conversation and the opening of the answer, which may call the
        tools. variables: of the chat template. run: does what takes long. Special tokens in what
        the client wrote are text.

        Raises ApiError if there is no template, if it refuses the conversation, or if the
        prompt cannot fit into `max_model_len` tokens.
        """
        if self._templates is None:
            raise invalid("This model has no chat template; use /v1/completions.", "messages")
        prompt = partial(self._chat, messages, tools, variables, max_model_len)
        plain = not (tools or variables or any(turn.tool_calls for turn in messages))
        if plain and sum(INLINE_TURN + len(turn.content) for turn in messages) <= INLINE_CHARS:
            return prompt()
        return await run(prompt)

    def _chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Function],
        variables: Mapping[str, Any],
        max_model_len: int,
    ) -> tuple[str, tuple[int, ...]]:
        marked = self._write(messages, tools, variables)
        text = self._special.without_marks(marked)
        self._weigh(text, max_model_len, "messages", self._special.count_marks(marked))
        self._probe(text, max_model_len, "messages")
        return text, tuple(self._special.encode(marked))

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
        self,
        text: str,
        max_model_len: int,
        *,
        add_special_tokens: bool = True,
        run: Run = in_thread,
    ) -> tuple[int, ...]:
        """Ids of a plain text, with the special tokens that the model expects around it. run: does
        what takes long.

        Raises ApiError if the prompt cannot fit into `max_model_len` tokens.
        """

        def prompt() -> tuple[int, ...]:
            self._probe(text, max_model_len, "prompt")
            return tuple(encoded(self._backend, text, add_special_tokens=add_special_tokens))

        self._weigh(text, max_model_len, "prompt")
        return prompt() if len(text) <= INLINE_CHARS else await run(prompt)

    def bad_tokens(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens: as the start of a text, and behind other words."""
        spellings = [text for word in words for text in (word, " " + word.lstrip())]
        found = (encoded(self._backend, text) for text in spellings)
        return tuple(dict.fromkeys(tuple(ids) for ids in found if ids))

    def _weigh(self, text: str, max_model_len: int, param: str, least: int = 0) -> None:
        """Raises ApiError for a text that is far too long. least: tokens that it has anyway."""
        # No token covers more bytes than the longest one does.
        least = max(least, len(text) // self._longest_token)
        if least > max_model_len:
            raise too_long(f"at least {least}", max_model_len, param)

    def _probe(self, text: str, max_model_len: int, param: str) -> None:
        """Raises ApiError for a text that is too long, and hardly takes more time than one that
        fits would."""
        if len(text) <= USUAL_CHARS * max_model_len + PROBE_CHARS:
            return
        tokens = 0
        for start in range(0, len(text), PROBE_CHARS):
            tokens += len(encoded(self._backend, text[start : start + PROBE_CHARS])) - CUT_TOKENS
            if tokens > max_model_len:
                raise too_long(f"more than {max_model_len}", max_model_len, param)

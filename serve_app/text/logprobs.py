"""Log probabilities as OpenAI's API shows them, in the two shapes of its endpoints.

What is told of a token is JSON at once: as objects until the end, all of an answer would take ten
times the memory, and other threads would wait for as long as it takes to encode them together.
The module knows neither HTTP nor what the rest of an answer looks like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from replica.messages import TokenLogprobs
from serve_app.text.token_texts import TokenTexts

_encode = msgspec.json.Encoder().encode
LEAST = -9999.0
"""Stands for minus infinity and for what is no number, which JSON cannot carry."""


class ShownToken(NamedTuple):
    """A token of an answer, or of an echoed prompt."""

    token_id: int
    offset: int
    """Characters of the text before it."""
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt, which nothing predicts."""


class Alternative(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class ContentToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct):
    content: list[msgspec.Raw]
    """`ContentToken`s."""
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Lists of equal length, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[msgspec.Raw | None]
    """Log probabilities by text."""
    text_offset: list[int]


class PromptToken(msgspec.Struct, gc=False):
    logprob: float
    decoded_token: str


def for_chat(tokens: Sequence[ShownToken], texts: TokenTexts) -> ChatLogprobs:
    content = []
    for token in tokens:
        assert token.logprobs is not None
        text, data = texts(token.token_id)
        top = [Alternative(t, p, b) for (t, b), p in _alternatives(token.logprobs, texts)]
        content.append(_json(ContentToken(text, _finite(token.logprobs.logprob), data, top)))
    return ChatLogprobs(content)


def for_text(tokens: Sequence[ShownToken], texts: TokenTexts) -> TextLogprobs:
    told = TextLogprobs([], [], [], [])
    for token_id, offset, logprobs in tokens:
        text, _ = texts(token_id)
        told.tokens.append(text)
        told.text_offset.append(offset)
        told.token_logprobs.append(None if logprobs is None else _finite(logprobs.logprob))
        told.top_logprobs.append(None if logprobs is None else _json(_top(text, logprobs, texts)))
    return told


def for_prompt(
    prompt_ids: Sequence[int], told: Sequence[TokenLogprobs], texts: TokenTexts
) -> list[msgspec.Raw | None]:
    """`PromptToken`s by token id, for each token of the prompt; null for the first."""
    entries: list[msgspec.Raw | None] = [None]
    for token_id, logprobs in zip(prompt_ids[1:], told, strict=True):
        pairs = [*zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)]
        pairs.append((token_id, logprobs.logprob))
        entries.append(_json({str(i): PromptToken(_finite(p), texts(i)[0]) for i, p in pairs}))
    return entries


def _json(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


def _alternatives(
    logprobs: TokenLogprobs, texts: TokenTexts
) -> list[tuple[tuple[str, list[int]], float]]:
    pairs = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    return [(texts(token), _finite(logprob)) for token, logprob in pairs]


def _top(chosen: str, logprobs: TokenLogprobs, texts: TokenTexts) -> dict[str, float]:
    """The most likely tokens, and the chosen one."""
    top: dict[str, float] = {}
    for (text, _), logprob in _alternatives(logprobs, texts):
        top.setdefault(text, logprob)
    top.setdefault(chosen, _finite(logprobs.logprob))
    return top


def _finite(logprob: float) -> float:
    return max(LEAST, logprob)  # in this order NaN, too, is LEAST

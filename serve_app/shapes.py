"""The two shapes of OpenAI's answers: a choice, and a chunk of one, for each endpoint.

The module knows neither HTTP nor how an answer is put together (`serve_app.replies`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec

from replica.messages import TokenLogprobs
from serve_app.choices import Piece
from serve_app.logprobs import (
    ChatLogprobs,
    PromptToken,
    TextLogprobs,
    ToldToken,
    for_chat,
    for_prompt,
    for_text,
)
from serve_app.sequence_text import Ending
from serve_app.token_texts import TokenTexts


class ChatMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


PromptLogprobs: TypeAlias = "list[dict[str, PromptToken] | None]"


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    finish_reason: Ending
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    finish_reason: Ending | None = None
    logprobs: ChatLogprobs | None = None


class TextChoice(msgspec.Struct):
    """A choice of /v1/completions, whole or in a chunk."""

    index: int
    text: str
    finish_reason: Ending | None = None
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True)
class Telling:
    """Which log probabilities an answer shows; the engine may have been asked for more."""

    texts: TokenTexts
    sampled: bool = False
    """Those of sampled tokens, and of an echoed prompt."""
    prompt: bool = False
    """Those of prompts, by the parameter of that name."""

    def of_prompt(
        self, prompt_ids: Sequence[int], told: Sequence[TokenLogprobs]
    ) -> PromptLogprobs | msgspec.UnsetType:
        return for_prompt(prompt_ids, told, self.texts) if self.prompt else msgspec.UNSET


class Shape(ABC):
    """What differs between the endpoints."""

    prefix: str
    object: str
    chunk_object: str

    @abstractmethod
    def opening(self, piece: Piece) -> msgspec.Struct | None:
        """The chunk that precedes the first piece of a choice, if there is one."""

    @abstractmethod
    def chunk(self, piece: Piece) -> msgspec.Struct: ...

    @abstractmethod
    def choice(self, piece: Piece, prompt_ids: Sequence[int]) -> msgspec.Struct:
        """A whole choice, of which `piece` holds everything."""


class ChatShape(Shape):
    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, telling: Telling) -> None:
        self._telling = telling

    def opening(self, piece: Piece) -> msgspec.Struct:
        return ChatChunkChoice(piece.choice, ChatDelta(role="assistant", content=""))

    def chunk(self, piece: Piece) -> msgspec.Struct:
        delta = ChatDelta(content=piece.text or ("" if piece.tokens else None))
        told = self._told(piece) if piece.tokens else None
        return ChatChunkChoice(piece.choice, delta, piece.ending, told)

    def choice(self, piece: Piece, prompt_ids: Sequence[int]) -> msgspec.Struct:
        assert piece.ending is not None
        return ChatChoice(
            piece.choice,
            ChatMessage(piece.text),
            piece.ending,
            self._told(piece),
            self._telling.of_prompt(prompt_ids, piece.prompt_logprobs),
        )

    def _told(self, piece: Piece) -> ChatLogprobs | None:
        return for_chat(piece.tokens, self._telling.texts) if self._telling.sampled else None


class Echo(NamedTuple):
    """A prompt at the head of its answer."""

    text: str
    tokens: tuple[tuple[int, int], ...]
    """(id, characters before it), where log probabilities are shown."""

    def told(self, logprobs: Sequence[TokenLogprobs]) -> list[ToldToken]:
        """logprobs: of all tokens but the first."""
        return [
            ToldToken(token, offset, told)
            for (token, offset), told in zip(self.tokens, (None, *logprobs), strict=True)
        ]


class CompletionShape(Shape):
    """`echoes` holds what each choice begins with, where the prompt is echoed."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, telling: Telling, echoes: Sequence[Echo] = ()) -> None:
        self._telling = telling
        self._echoes = echoes

    def opening(self, piece: Piece) -> msgspec.Struct | None:
        if not self._echoes:
            return None
        echo = self._echoes[piece.choice]
        told = None
        if self._telling.sampled:
            told = for_text(echo.told(piece.prompt_logprobs), self._telling.texts)
        return TextChoice(piece.choice, echo.text, None, told)

    def chunk(self, piece: Piece) -> msgspec.Struct:
        told = self._told(piece) if piece.tokens else None
        return TextChoice(piece.choice, piece.text, piece.ending, told)

    def choice(self, piece: Piece, prompt_ids: Sequence[int]) -> msgspec.Struct:
        head = self._echoes[piece.choice].text if self._echoes else ""
        return TextChoice(
            piece.choice,
            head + piece.text,
            piece.ending,
            self._told(piece, whole=True),
            self._telling.of_prompt(prompt_ids, piece.prompt_logprobs),
        )

    def _told(self, piece: Piece, whole: bool = False) -> TextLogprobs | None:
        if not self._telling.sampled:
            return None
        if not self._echoes:
            return for_text(piece.tokens, self._telling.texts)
        echo = self._echoes[piece.choice]
        head = echo.told(piece.prompt_logprobs) if whole else []
        behind = [token._replace(offset=len(echo.text) + token.offset) for token in piece.tokens]
        return for_text([*head, *behind], self._telling.texts)

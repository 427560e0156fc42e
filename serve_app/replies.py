"""Answers of OpenAI's API: the JSON of whole answers, and the events of streamed ones.

The two endpoints differ in shape only, so each has a `Shape`. The module knows neither HTTP
nor where texts come from.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from serve_app.choices import Choice, Piece
from serve_app.sequence_text import Ending

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of the whole request."""

    prompt_tokens: int
    """Each prompt once, however many choices it has."""
    completion_tokens: int
    """Every token sampled, stop tokens included."""
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ChatMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    finish_reason: Ending
    logprobs: None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    finish_reason: Ending | None = None
    logprobs: None = None


class TextChoice(msgspec.Struct):
    """A choice of /v1/completions, whole or in a chunk."""

    index: int
    text: str
    finish_reason: Ending | None = None
    logprobs: None = None


class Shape(ABC):
    """What differs between the endpoints."""

    prefix: str
    object: str
    chunk_object: str

    @abstractmethod
    def opening(self, index: int) -> msgspec.Struct | None:
        """The chunk that precedes the first text of a choice, if there is one."""

    @abstractmethod
    def chunk(self, piece: Piece) -> msgspec.Struct: ...

    @abstractmethod
    def choice(self, index: int, text: str, ending: Ending) -> msgspec.Struct: ...


class ChatShape(Shape):
    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> msgspec.Struct:
        return ChatChunkChoice(index, ChatDelta(role="assistant", content=""))

    def chunk(self, piece: Piece) -> msgspec.Struct:
        return ChatChunkChoice(piece.choice, ChatDelta(content=piece.text or None), piece.ending)

    def choice(self, index: int, text: str, ending: Ending) -> msgspec.Struct:
        return ChatChoice(index, ChatMessage(text), ending)


class CompletionShape(Shape):
    """`echoes` holds the text that each choice begins with, where the prompt is echoed."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, echoes: Sequence[str] = ()) -> None:
        self._echoes = echoes

    def opening(self, index: int) -> msgspec.Struct | None:
        return TextChoice(index, self._echoes[index]) if self._echoes else None

    def chunk(self, piece: Piece) -> msgspec.Struct:
        return TextChoice(piece.choice, piece.text, piece.ending)

    def choice(self, index: int, text: str, ending: Ending) -> msgspec.Struct:
        echo = self._echoes[index] if self._echoes else ""
        return TextChoice(index, echo + text, ending)


class Reply:
    """Writes the answer to one request, whole or by events."""

    def __init__(self, shape: Shape, model: str) -> None:
        self.id = shape.prefix + uuid.uuid4().hex
        self._shape = shape
        self._model = model
        self._created = int(time.time())

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """The body of a plain answer."""
        texts: dict[int, list[str]] = {}
        endings: dict[int, Ending] = {}
        for index, text, ending in pieces:
            texts.setdefault(index, []).append(text)
            if ending is not None:
                endings[index] = ending
        choices = [
            self._shape.choice(index, "".join(texts[index]), endings[index])
            for index in sorted(texts)
        ]
        return _encode({**self._head(self._shape.object), "choices": choices, "usage": usage})

    def events(self, include_usage: bool) -> EventWriter:
        return EventWriter(self._head(self._shape.chunk_object), self._shape, include_usage)

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}


class EventWriter:
    """Writes the events of one stream. All but the choice is the same bytes in each."""

    def __init__(self, head: dict[str, object], shape: Shape, include_usage: bool) -> None:
        self._shape = shape
        self._include_usage = include_usage
        self._begin = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._opened: set[int] = set()

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """One event per piece; the first of a choice is preceded by its opening."""
        return b"".join(map(self._piece, pieces))

    def _piece(self, piece: Piece) -> bytes:
        event = self._event(self._shape.chunk(piece))
        if piece.choice in self._opened:
            return event
        self._opened.add(piece.choice)
        opening = self._shape.opening(piece.choice)
        before = b"" if opening is None else self._event(opening)
        return before + event if piece.text or piece.ending else before

    def _event(self, choice: msgspec.Struct) -> bytes:
        return self._begin + _encode(choice) + self._end

    def closing(self, usage: Usage) -> bytes:
        """The end of the stream: usage where it was asked for, then [DONE]."""
        if not self._include_usage:
            return DONE
        return self._begin + b'],"usage":' + _encode(usage) + b"}\n\n" + DONE


def usage(choices: Sequence[Choice], prompts: int) -> Usage:
    """Usage of a request whose choices belong to `prompts` prompts, prompt by prompt.

    A prompt's cached tokens are those that its first choice found.
    """
    first_of_prompts = choices[:: len(choices) // prompts]
    prompt_tokens = sum(len(choice.generation.prompt_ids) for choice in first_of_prompts)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    cached_tokens = sum(choice.cached_tokens for choice in first_of_prompts)
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptDetails(cached_tokens),
    )


def error_event(body: bytes) -> bytes:
    """An error after the stream has begun; `body` is that of the error's own answer."""
    return b"data: " + body + b"\n\n"

"""Answers of OpenAI's API: the JSON of whole answers, and the events of streamed ones.

The two endpoints differ in format only (`serve_app.http.formats`). The module knows neither HTTP
nor where texts come from.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import msgspec

from serve_app.http.choices import Choice, Piece, joined
from serve_app.http.formats import EndpointFormat

_encode = msgspec.json.Encoder().encode
SEPARATORS = ("\u0085", "\u2028", "\u2029")
"""Line breaks to Unicode and not to JSON: many clients split a stream there."""
_ESCAPES = tuple((each.encode(), f"\\u{ord(each):04x}".encode()) for each in SEPARATORS)


def one_line(data: bytes) -> bytes:
    """JSON that no reader of lines takes for several."""
    for raw, escaped in _ESCAPES:
        data = data.replace(raw, escaped)
    return data


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of the whole request."""

    prompt_tokens: int
    """Each prompt once, however many choices it has."""
    completion_tokens: int
    """Tokens of all generated choices, each up to the token that ended it, which counts."""
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Reply:
    """Writes the answer to one request, whole or by events."""

    def __init__(self, endpoint: EndpointFormat, model: str) -> None:
        self.id = endpoint.prefix + uuid.uuid4().hex
        self._endpoint = endpoint
        self._model = model
        self._created = int(time.time())

    def whole(
        self, pieces: Sequence[Piece], prompts: Sequence[Sequence[int]], usage: Usage
    ) -> bytes:
        """The body of a plain answer. prompts: the ids of each choice's prompt."""
        by_choice: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_choice.setdefault(piece.choice, []).append(piece)
        choices = [
            self._endpoint.choice(joined(by_choice[index]), prompts[index])
            for index in sorted(by_choice)
        ]
        return _encode({**self._head(self._endpoint.object), "choices": choices, "usage": usage})

    def events(self, include_usage: bool) -> EventWriter:
        return EventWriter(self._head(self._endpoint.chunk_object), self._endpoint, include_usage)

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}


class EventWriter:
    """Writes the events of one stream. All but the choice is the same bytes in each."""

    def __init__(
        self, head: dict[str, object], endpoint: EndpointFormat, include_usage: bool
    ) -> None:
        self._endpoint = endpoint
        self._include_usage = include_usage
        self._begin = b"data: " + one_line(_encode(head))[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._opened: set[int] = set()

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """The first events of a choice are preceded by its opening."""
        return b"".join(map(self._piece, pieces))

    def _piece(self, piece: Piece) -> bytes:
        events = b"".join(map(self._event, self._endpoint.chunks(piece)))
        if piece.choice in self._opened:
            return events
        self._opened.add(piece.choice)
        return self._event(self._endpoint.opening(piece)) + events

    def _event(self, choice: msgspec.Struct | None) -> bytes:
        return b"" if choice is None else self._begin + one_line(_encode(choice)) + self._end

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
    return b"data: " + one_line(body) + b"\n\n"

"""The two shapes of OpenAI's answers: a choice, and a chunk of one, for each endpoint.

The module knows neither HTTP nor how an answer is put together (`serve_app.replies`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

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
from serve_app.tool_calls import CallDelta, ToolCallReader


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A call in a stream: its beginning has an id and a name."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


ChatEnding: TypeAlias = Literal["stop", "length", "tool_calls"]
PromptLogprobs: TypeAlias = "list[dict[str, PromptToken] | None]"


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    finish_reason: ChatEnding
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    finish_reason: ChatEnding | None = None
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
    def chunk(self, piece: Piece) -> msgspec.Struct | None:
        """None if nothing is certain yet."""

    @abstractmethod
    def choice(self, piece: Piece, prompt_ids: Sequence[int]) -> msgspec.Struct:
        """A whole choice, of which `piece` holds everything."""


class ChatShape(Shape):
    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, telling: Telling, *, reads_calls: bool = False) -> None:
        """reads_calls: the text may call tools."""
        self._telling = telling
        self._readers: defaultdict[int, ToolCallReader] | None = None
        if reads_calls:
            self._readers = defaultdict(ToolCallReader)

    def opening(self, piece: Piece) -> msgspec.Struct:
        return ChatChunkChoice(piece.choice, ChatDelta(role="assistant", content=""))

    def chunk(self, piece: Piece) -> msgspec.Struct | None:
        text, calls, ending = self._read(piece)
        if not (text or calls or ending or piece.tokens):
            return None
        delta = ChatDelta(content=text or ("" if piece.tokens and not calls else None))
        if calls:
            delta.tool_calls = [_call_delta(call) for call in calls]
        told = self._told(piece) if piece.tokens else None
        return ChatChunkChoice(piece.choice, delta, ending, told)

    def choice(self, piece: Piece, prompt_ids: Sequence[int]) -> msgspec.Struct:
        text, calls, ending = self._read(piece)
        assert ending is not None
        message = ChatMessage(text)
        if calls:
            message = ChatMessage(text or None, tool_calls=_whole_calls(calls))
        return ChatChoice(
            piece.choice,
            message,
            ending,
            self._told(piece),
            self._telling.of_prompt(prompt_ids, piece.prompt_logprobs),
        )

    def _read(self, piece: Piece) -> tuple[str, list[CallDelta], ChatEnding | None]:
        if self._readers is None:
            return piece.text, [], piece.ending
        reader = self._readers[piece.choice]
        text, calls = reader.push(piece.text, last=piece.ending is not None)
        called = piece.ending == "stop" and reader.calls > 0
        return text, calls, "tool_calls" if called else piece.ending

    def _told(self, piece: Piece) -> ChatLogprobs | None:
        return for_chat(piece.tokens, self._telling.texts) if self._telling.sampled else None


def _call_delta(call: CallDelta) -> ToolCallDelta:
    kind = None if call.id is None else "function"
    return ToolCallDelta(call.number, FunctionDelta(call.arguments, call.name), call.id, kind)


def _whole_calls(deltas: Sequence[CallDelta]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            calls.append(ToolCall(delta.id, CalledFunction(delta.name, "")))
        calls[delta.number].function.arguments += delta.arguments
    return calls


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

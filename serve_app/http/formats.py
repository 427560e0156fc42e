"""The two shapes of OpenAI's answers: a choice, and a chunk of one, for each endpoint.

The module knows neither HTTP nor how an answer is put together (`serve_app.http.replies`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from replica.messages import TokenLogprobs
from serve_app.http.choices import Piece
from serve_app.text.logprobs import (
    ChatLogprobs,
    ShownToken,
    TextLogprobs,
    for_chat,
    for_prompt,
    for_text,
)
from serve_app.text.reasoning import ReasoningReader, ReasoningTags
from serve_app.text.sequence_text import Ending
from serve_app.text.token_texts import TokenTexts
from serve_app.text.tool_calls import CallDelta, ToolCallReader


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
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


ChatEnding: TypeAlias = Literal["stop", "length", "tool_calls"]
PromptLogprobs: TypeAlias = "list[msgspec.Raw | None]"


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
    reasoning_content: str | None = None


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
class ShownLogprobs:
    """Which log probabilities an answer shows; the engine may have computed more."""

    texts: TokenTexts
    sampled: bool = False
    """Those of sampled tokens, and of an echoed prompt."""
    prompt: bool = False
    """Those of prompts, by the parameter of that name."""

    def of_prompt(
        self, prompt_ids: Sequence[int], told: Sequence[TokenLogprobs]
    ) -> PromptLogprobs | msgspec.UnsetType:
        return for_prompt(prompt_ids, told, self.texts) if self.prompt else msgspec.UNSET


class EndpointFormat(ABC):
    """What differs between the endpoints."""

    prefix: str
    object: str
    chunk_object: str

    @abstractmethod
    def opening(self, piece: Piece) -> msgspec.Struct | None:
        """The chunk that precedes the first piece of a choice, if there is one."""

    @abstractmethod
    def chunks(self, piece: Piece) -> list[msgspec.Struct]:
        """What is certain now. How a choice ends comes in a chunk of its own: some clients look
        at nothing else there."""

    @abstractmethod
    def choice(self, piece: Piece, prompt_ids: Sequence[int]) -> msgspec.Struct:
        """A whole choice, of which `piece` holds everything."""


class ChatFormat(EndpointFormat):
    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        shown: ShownLogprobs,
        *,
        new_caller: Callable[[], ToolCallReader] | None = None,
        reasoning: ReasoningTags | None = None,
        thinking: bool = False,
    ) -> None:
        """new_caller: reads the calls of a choice, if its text may make any. reasoning: it is
        split by these tags. thinking: it begins between them."""
        self._shown = shown
        self._callers: defaultdict[int, ToolCallReader] | None = None
        if new_caller is not None:
            self._callers = defaultdict(new_caller)
        self._thinkers: defaultdict[int, ReasoningReader] | None = None
        if reasoning is not None:
            self._thinkers = defaultdict(partial(ReasoningReader, reasoning, is_open=thinking))

    def opening(self, piece: Piece) -> msgspec.Struct:
        return ChatChunkChoice(piece.choice, ChatDelta(role="assistant", content=""))

    def chunks(self, piece: Piece) -> list[msgspec.Struct]:
        thoughts, text, calls, ending = self._read(piece)
        chunks: list[msgspec.Struct] = []
        if thoughts or text or calls or piece.tokens:
            nothing_else = piece.tokens and not calls and not thoughts
            delta = ChatDelta(
                content=text or ("" if nothing_else else None),
                tool_calls=[_call_delta(call) for call in calls] or None,
                reasoning_content=thoughts or None,
            )
            told = self._told(piece) if piece.tokens else None
            chunks.append(ChatChunkChoice(piece.choice, delta, None, told))
        if ending:
            chunks.append(ChatChunkChoice(piece.choice, ChatDelta(), ending))
        return chunks

    def choice(self, piece: Piece, prompt_ids: Sequence[int]) -> msgspec.Struct:
        thoughts, text, calls, ending = self._read(piece)
        assert ending is not None
        message = ChatMessage(text)
        if calls:
            message = ChatMessage(text or None, tool_calls=_whole_calls(calls))
        if thoughts:
            message.reasoning_content = thoughts
        return ChatChoice(
            piece.choice,
            message,
            ending,
            self._told(piece),
            self._shown.of_prompt(prompt_ids, piece.prompt_logprobs),
        )

    def _read(self, piece: Piece) -> tuple[str, str, list[CallDelta], ChatEnding | None]:
        """(thoughts, content, calls, how it ends)."""
        thoughts, text, last = "", piece.text, piece.ending is not None
        if self._thinkers is not None:
            thoughts, text = self._thinkers[piece.choice].push(text, last=last)
        if self._callers is None:
            return thoughts, text, [], piece.ending
        caller = self._callers[piece.choice]
        text, calls = caller.push(text, last=last)
        called = piece.ending == "stop" and caller.is_complete
        return thoughts, text, calls, "tool_calls" if called else piece.ending

    def _told(self, piece: Piece) -> ChatLogprobs | None:
        return for_chat(piece.tokens, self._shown.texts) if self._shown.sampled else None


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

    def told(self, logprobs: Sequence[TokenLogprobs]) -> list[ShownToken]:
        """logprobs: of all tokens but the first."""
        return [
            ShownToken(token, offset, told)
            for (token, offset), told in zip(self.tokens, (None, *logprobs), strict=True)
        ]


class CompletionFormat(EndpointFormat):
    """`echoes` holds what each choice begins with, where the prompt is echoed."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, shown: ShownLogprobs, echoes: Sequence[Echo] = ()) -> None:
        self._shown = shown
        self._echoes = echoes

    def opening(self, piece: Piece) -> msgspec.Struct | None:
        if not self._echoes:
            return None
        echo = self._echoes[piece.choice]
        told = None
        if self._shown.sampled:
            told = for_text(echo.told(piece.prompt_logprobs), self._shown.texts)
        return TextChoice(piece.choice, echo.text, None, told)

    def chunks(self, piece: Piece) -> list[msgspec.Struct]:
        chunks: list[msgspec.Struct] = []
        if piece.text or piece.tokens:
            told = self._told(piece) if piece.tokens else None
            chunks.append(TextChoice(piece.choice, piece.text, None, told))
        if piece.ending:
            chunks.append(TextChoice(piece.choice, "", piece.ending))
        return chunks

    def choice(self, piece: Piece, prompt_ids: Sequence[int]) -> msgspec.Struct:
        head = self._echoes[piece.choice].text if self._echoes else ""
        return TextChoice(
            piece.choice,
            head + piece.text,
            piece.ending,
            self._told(piece, whole=True),
            self._shown.of_prompt(prompt_ids, piece.prompt_logprobs),
        )

    def _told(self, piece: Piece, whole: bool = False) -> TextLogprobs | None:
        if not self._shown.sampled:
            return None
        if not self._echoes:
            return for_text(piece.tokens, self._shown.texts)
        echo = self._echoes[piece.choice]
        head = echo.told(piece.prompt_logprobs) if whole else []
        behind = [token._replace(offset=len(echo.text) + token.offset) for token in piece.tokens]
        return for_text([*head, *behind], self._shown.texts)

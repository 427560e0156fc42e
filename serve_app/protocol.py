"""Requests of OpenAI's API, as far as they can be checked without a model or a tokenizer.

Strict: no number is read from a string or a bool, and no int from a float. Fields that OpenAI
does not define are ignored. The module knows neither HTTP nor what happens to a request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from serve_app.limits import Limits
from serve_app.unsupported import CHAT, COMPLETION, IGNORED, MESSAGE, Table, first_unsupported

MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 16

Prompt: TypeAlias = "str | list[int]"


def _fault(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid", "{message}", {"message": message})


def _unsupported(name: str) -> PydanticCustomError:
    message = "{param} is not supported by this server"
    return PydanticCustomError("unsupported_parameter", message, {"param": name})


def _as_stops(value: object) -> tuple[str, ...]:
    """A string or a list of strings, as a tuple without duplicates."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise _fault(f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise _fault(f"each must be a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _as_prompts(value: object) -> list[Prompt]:
    """A text, a list of token ids, or a list of either kind; here always a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(map(_is_ids, value)):
            return value
    raise _fault("must be a text, a list of token ids, or a list of texts or of such lists")


def _as_text(value: object) -> str:
    """The content of a message: a text, or text parts, which are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _fault("must be a text or a list of text parts")
    return "\n".join(map(_text_of_part, value))


def _text_of_part(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise _fault('only parts {"type": "text", "text": ...} are supported')


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def refuse_unsupported(self, table: Table) -> None:
        """Raises PydanticCustomError for what would change the answer if it were honoured."""
        name = first_unsupported(self.model_extra or {}, table)
        if name is not None:
            raise _unsupported(name)


class Message(_Fields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_as_text)]

    @model_validator(mode="after")
    def _supported(self) -> Message:
        self.refuse_unsupported(MESSAGE)
        return self


class StreamOptions(_Fields):
    include_usage: bool | None = None


class GenerationRequest(_Fields):
    """What both endpoints share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Any = None
    """Checked once the prompt's length is known: a prompt that is too long is told first."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """0, -1 and null keep all; more than the vocabulary has means all, too."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_as_stops)] = ()
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    """True by default."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise _fault("stream_options is allowed only when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def asked_limit(self) -> tuple[str, Any]:
        """Name and value of the field that limits the output."""
        return "max_tokens", self.max_tokens

    def default_limit(self, limits: Limits) -> int:
        """Most output tokens where the request names no limit."""
        return limits.default_max_tokens

    def unknown_fields(self) -> list[str]:
        """Names that neither OpenAI nor this server defines."""
        return [name for name in self.model_extra or {} if name not in IGNORED]


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Any = None

    @model_validator(mode="after")
    def _supported(self) -> ChatRequest:
        self.refuse_unsupported(CHAT)
        return self

    @property
    def asked_limit(self) -> tuple[str, Any]:
        """`max_completion_tokens` goes before the older `max_tokens`."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().asked_limit


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_as_prompts)]
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _supported(self) -> CompletionRequest:
        self.refuse_unsupported(COMPLETION)
        if self.best_of not in (None, self.choices_per_prompt):
            raise _unsupported("best_of")
        return self

    def default_limit(self, limits: Limits) -> int:
        return limits.default_completion_tokens

"""Requests of OpenAI's API, as far as they can be checked without a model or a tokenizer.

Strict: no number is read from a string or a bool, and no int from a float. Fields that OpenAI
does not define are ignored. The module knows neither HTTP nor what happens to a request.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Field, model_validator

from replica.messages import MAX_LOGPROBS
from serve_app.protocol.conversation import MAX_TOOLS, MAX_TURNS, Fields, Function, Message, Tool
from serve_app.protocol.fields import (
    MAX_STOP_TOKEN_IDS,
    BadWords,
    Biases,
    Choices,
    JsonSchema,
    Prompts,
    ResponseFormat,
    Stops,
    TemplateKwargs,
    ToolChoice,
    fault,
)
from serve_app.protocol.limits import Limits
from serve_app.protocol.unsupported import CHAT, COMPLETION, IGNORED

Messages: TypeAlias = Annotated[
    list[Message], Field(min_length=1, max_length=MAX_TURNS, fail_fast=True)
]
STRUCTURES = (
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Fields that structure the output; at most one is given."""
MAX_PRIORITY = 1000
ENDLESS = ("min_tokens", "ignore_eos")
"""Fields that let an answer go on where it would end."""


class StreamOptions(Fields):
    include_usage: bool | None = None


class GenerationRequest(Fields):
    """What both endpoints share."""

    model: str | None
    """Required, but null is a name that no model has."""
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Any = None
    """Checked once the prompt's length is known: a prompt that is too long is told first."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """0, -1 and null keep all; more than the vocabulary has means all, too."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Biases = ()
    bad_words: BadWords = ()
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat = None
    """The JSON schema that it asks for."""
    guided_json: JsonSchema = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: Choices = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None
    """In Lark's notation."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stops = ()
    stop_token_ids: (
        Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    """True by default."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Any = None
    """Without effect."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Among what waits of the same tenant, the least goes first."""

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            message = "stream_options is allowed only when stream is true"
            raise fault(message, "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise fault("prompt_logprobs is not allowed in a stream", "prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _one_structure(self) -> GenerationRequest:
        asked = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(asked) > 1:
            raise fault(f"{asked[1]} cannot be combined with {asked[0]}", asked[1])
        # Where the structure is complete nothing but the end can follow.
        for name in ENDLESS:
            if asked and getattr(self, name):
                raise fault(f"{name} cannot be combined with {asked[0]}", name)
        return self

    @property
    def structure(self) -> tuple[str, Any] | None:
        """Name and value of the field that structures the output, if one does."""
        asked = ((name, getattr(self, name)) for name in STRUCTURES)
        return next((field for field in asked if field[1] is not None), None)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def shown_per_prompt(self) -> int:
        """Choices of each prompt that the client gets."""
        return self.n or 1

    @property
    def choices_per_prompt(self) -> int:
        """Choices of each prompt that are generated."""
        return self.shown_per_prompt

    @property
    def alternatives(self) -> int | None:
        """How many are told of each sampled token; None if log probabilities are not shown."""
        return None

    @property
    def prompt_alternatives(self) -> int | None:
        """How many are told of each prompt token; None if nothing is."""
        return self.prompt_logprobs

    @property
    def no_output(self) -> bool:
        """Only the prompt is of interest."""
        return False

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

    messages: Messages
    max_completion_tokens: Any = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice = ("auto", None)
    """(mode, names)."""
    chat_template_kwargs: Annotated[TemplateKwargs, Field(default_factory=dict)]
    """Variables of the chat template, such as `enable_thinking`."""
    parallel_tool_calls: bool | None = None
    """True by default: one answer may make several calls."""

    @model_validator(mode="after")
    def _tools_fit(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        mode, chosen = self.tool_choice
        if len(set(names)) < len(names):
            raise fault("tools must have different names", "tools")
        if not names and mode in ("required", "one"):
            raise fault("tool_choice needs tools", "tool_choice")
        if chosen is not None and not chosen <= set(names):
            raise fault("tool_choice names what is none of the tools", "tool_choice")
        if self.offered_tools:
            for other in ("guided_regex", "guided_choice", "guided_grammar", *ENDLESS):
                if getattr(self, other):
                    raise fault(f"{other} cannot be combined with tools", other)
        return self

    @property
    def offered_tools(self) -> list[Function]:
        """Those that the answer may call."""
        mode, chosen = self.tool_choice
        functions = [tool.function for tool in self.tools or () if mode != "none"]
        return [one for one in functions if chosen is None or one.name in chosen]

    @property
    def is_bound(self) -> bool:
        """Whether the answer has a form from its first token on, so that nothing can precede it."""
        calls = bool(self.offered_tools) and self.tool_mode != "auto"
        return calls or self.structure is not None

    @property
    def tool_mode(self) -> str:
        """What an answer that has tools looks like: "auto" text or calls, "required" calls, "one"
        a single call."""
        return self.tool_choice[0]

    @model_validator(mode="after")
    def _supported(self) -> ChatRequest:
        self.refuse_unsupported(CHAT)
        if self.top_logprobs and not self.logprobs:
            raise fault("top_logprobs is allowed only when logprobs is true", "top_logprobs")
        return self

    @property
    def alternatives(self) -> int | None:
        """As of every request."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_limit(self) -> tuple[str, Any]:
        """`max_completion_tokens` goes before the older `max_tokens`."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().asked_limit


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _supported(self) -> CompletionRequest:
        self.refuse_unsupported(COMPLETION)
        if self.choices_per_prompt < self.shown_per_prompt:
            raise fault("best_of must be at least n", "best_of")
        if self.stream and self.choices_per_prompt > self.shown_per_prompt:
            raise fault("best_of cannot be greater than n in a stream", "best_of")
        return self

    @property
    def choices_per_prompt(self) -> int:
        """The best of these are shown."""
        return self.best_of or self.shown_per_prompt

    @property
    def alternatives(self) -> int | None:
        """As of every request."""
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        """An echoed prompt tells the log probabilities of its tokens, too."""
        of_echo = self.logprobs if self.echo else None
        asked = [count for count in (self.prompt_logprobs, of_echo) if count is not None]
        return max(asked, default=None)

    @property
    def no_output(self) -> bool:
        """An echo and nothing behind it."""
        return bool(self.echo) and type(self.max_tokens) is int and self.max_tokens == 0

    def default_limit(self, limits: Limits) -> int:
        return limits.default_completion_tokens


class TokenizeRequest(Fields):
    """Body of POST /tokenize: a text, or a conversation as /v1/chat/completions has it."""

    model: str | None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """True by default: those that the model expects around a plain text."""

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise fault("give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Fields):
    """Body of POST /detokenize."""

    model: str | None
    tokens: Annotated[list[int], Field(fail_fast=True)]

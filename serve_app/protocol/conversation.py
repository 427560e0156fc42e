"""What a conversation is made of: its turns, earlier calls, and the tools that may be called.

The module knows neither which request they belong to, nor how a template writes them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serve_app.protocol.fields import Arguments, Content, Parameters, Thoughts, unsupported
from serve_app.protocol.unsupported import MESSAGE, Table, first_unsupported

MAX_TOOLS = 128
MAX_TURNS = 2048
"""Messages of a conversation, as many as OpenAI takes."""


class Fields(BaseModel):
    """Checked strictly; what is not defined is kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def refuse_unsupported(self, table: Table) -> None:
        """Raises PydanticCustomError for what would change the answer if it were honoured."""
        name = first_unsupported(self.model_extra or {}, table)
        if name is not None:
            raise unsupported(name)


class CalledFunction(Fields):
    name: str
    arguments: Arguments = Field(default_factory=dict)
    """An object, or the text of what is none, such as a call that was cut."""


class ToolCall(Fields):
    """A call that an earlier answer has made."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction


class Message(Fields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: Thoughts = None
    """What an earlier answer has thought; `reasoning` is another name of it."""
    reasoning: Thoughts = None
    content: Content = Field(None, validate_default=True)

    @model_validator(mode="after")
    def _supported(self) -> Message:
        self.refuse_unsupported(MESSAGE)
        return self


class Function(Fields):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: Parameters = None
    """A JSON schema; without one it takes none."""
    strict: bool | None = None


class Tool(Fields):
    """What an answer may call."""

    type: Literal["function"]
    function: Function

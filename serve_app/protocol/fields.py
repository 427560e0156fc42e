"""Values of single fields: what a request may say, in the form in which it is used.

Each function takes what JSON held and raises a PydanticCustomError, in words for the client,
for what it cannot be. The module does not know which request a field belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from inspect import signature
from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError, from_json
from transformers import PreTrainedTokenizerBase

from replica.messages import MAX_BIASES
from serve_app.protocol.json_parts import Allowance

MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 16
MAX_BAD_WORDS = 32
MAX_BAD_WORD_CHARS = 128
MAX_BIAS = 100
MAX_CHOICES = 1000
MAX_PROMPTS = 2048
"""As many as OpenAI takes; the server's own limit is lower by default."""
MAX_TEMPLATE_CHARS = 64 * 1024
"""Of a template's variables as JSON."""
RESERVED = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {
    "messages"
}
"""Arguments of transformers' rendering of a template."""

Prompt: TypeAlias = "str | list[int]"


def fault(message: str, param: str | None = None) -> PydanticCustomError:
    """`param` where no single field is being validated."""
    return PydanticCustomError("invalid", "{message}", {"message": message, "param": param})


def unsupported(name: str) -> PydanticCustomError:
    message = "{param} is not supported by this server"
    return PydanticCustomError("unsupported_parameter", message, {"param": name})


def as_stops(value: object) -> tuple[str, ...]:
    """A string or a list of strings, as a tuple without duplicates."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise fault(f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise fault(f"each must be a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def as_bad_words(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_BAD_WORDS:
        raise fault(f"must be a list of at most {MAX_BAD_WORDS} strings")
    if not all(isinstance(word, str) and 1 <= len(word) <= MAX_BAD_WORD_CHARS for word in value):
        raise fault(f"each must be a string of 1 to {MAX_BAD_WORD_CHARS} characters")
    return tuple(dict.fromkeys(value))


def as_biases(value: object) -> tuple[tuple[int, float], ...]:
    """An object of token ids, written as decimal numbers, and what to add to their logits."""
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise fault(f"must be an object of at most {MAX_BIASES} token ids and biases")
    if not all(map(_is_written_id, value)):
        raise fault("the keys must be token ids")
    if not all(map(_is_bias, value.values())):
        raise fault(f"the values must be numbers from -{MAX_BIAS} to {MAX_BIAS}")
    biases = {int(token): float(bias) for token, bias in value.items()}
    return tuple(sorted((token, bias) for token, bias in biases.items() if bias))


def _is_written_id(key: object) -> bool:
    """As `str` writes it: no sign, no leading zero, and no two keys for one id."""
    return isinstance(key, str) and len(key) < 20 and key.isdecimal() and str(int(key)) == key


def _is_bias(value: object) -> bool:
    return type(value) in (int, float) and -MAX_BIAS <= value <= MAX_BIAS  # type: ignore[operator]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def as_prompts(value: object) -> list[Prompt]:
    """A text, a list of token ids, or a list of either kind; here always a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise fault(f"must be at most {MAX_PROMPTS} prompts")
        if all(isinstance(item, str) for item in value) or all(map(_is_ids, value)):
            return value
    raise fault("must be a text, a list of token ids, or a list of texts or of such lists")


MAY_BE_SILENT = ("assistant", "tool")
"""Roles whose message may have no content: an answer may be calls alone, and a result nothing."""


def as_content(value: object, info: ValidationInfo) -> str:
    """The content of a message: a text, or text parts, which are joined by line breaks."""
    if value in (None, []) and info.data.get("role", "assistant") in MAY_BE_SILENT:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise fault("must be a text or a list of text parts")
    return "\n".join(map(_text_of_part, value))


def _text_of_part(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
    raise fault('only parts {"type": "text", "text": ...} are supported')


def as_thoughts(value: object) -> str | None:
    """What an earlier answer has thought. Clients give the name to other things, too, which say
    nothing to a template."""
    return value if isinstance(value, str) else None


def as_response_format(value: object) -> Mapping[str, Any] | None:
    """The JSON schema that it asks for; None for plain text."""
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object", "schema": schema} if schema is not None:
            raise fault("a schema needs the type json_schema")
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case {"type": "json_schema"}:
            raise fault("json_schema must be an object with a schema, which is an object")
    raise fault("type must be text, json_object or json_schema")


def as_tool_choice(value: object) -> tuple[str, frozenset[str] | None]:
    """(mode, names of the tools that may be called; None for all)."""
    match value:
        case None:
            return "auto", None
        case "none" | "auto" | "required":
            return value, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "one", frozenset([name])
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        }:
            return mode, frozenset(map(_name_of_tool, tools))
    raise fault(
        'must be none, auto, required, {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
    )


def _name_of_tool(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise fault('each tool must be {"type": "function", "function": {"name": ...}}')


def as_template_kwargs(value: object) -> Mapping[str, Any]:
    """Variables of the chat template."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fault("must be an object")
    if RESERVED & value.keys():
        raise fault("must not set what the server sets: the template, its messages and tools")
    size = 0
    for piece in json.JSONEncoder().iterencode(value):
        size += len(piece)
        if size > MAX_TEMPLATE_CHARS:
            raise fault(f"must not be larger than {MAX_TEMPLATE_CHARS} characters of JSON")
    return value


def as_parameters(value: object) -> Mapping[str, Any] | None:
    """Of a tool: a JSON schema of objects; arguments are one."""
    if value is None or (isinstance(value, dict) and value.get("type", "object") == "object"):
        return value
    raise fault('must be a JSON schema of type "object"')


def as_arguments(value: object, info: ValidationInfo) -> dict[str, Any] | str:
    """Of a call that an earlier answer has made: a JSON object, written as a string. Any other
    string is kept as it is: a call that was cut, or that a model got wrong, is history, too."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}  # clients write nothing where it is empty
    arguments = _read(value, info.context) if isinstance(value, str) else value
    if isinstance(arguments, dict):
        return arguments
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_schema(value: object, info: ValidationInfo) -> Mapping[str, Any] | None:
    """A JSON schema: an object, or one written as a string."""
    if value is None:
        return None
    schema = _read(value, info.context) if isinstance(value, str) else value
    if isinstance(schema, dict):
        return schema
    raise fault("must be a JSON schema")


def _read(text: str, allowance: Allowance | None) -> Any:
    """What JSON in a string says, as strictly as the body is read; None if it is none."""
    if allowance is not None and not allowance.covers(text.encode("utf-8", "replace")):
        raise fault("holds too many values, as do all such texts of the request together")
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return None


def as_choices(value: object) -> tuple[str, ...] | None:
    """Texts, one of which the answer is to be."""
    if value is None:
        return None
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise fault(f"must be a list of 1 to {MAX_CHOICES} strings")
    if not all(isinstance(text, str) and text for text in value):
        raise fault("each must be a string that is not empty")
    return tuple(dict.fromkeys(value))


# What the fields are declared as, and what their JSON looks like.

Stops: TypeAlias = Annotated[
    tuple[str, ...],
    PlainValidator(as_stops, json_schema_input_type=str | list[str] | None),
]
BadWords: TypeAlias = Annotated[
    tuple[str, ...],
    PlainValidator(as_bad_words, json_schema_input_type=list[str] | None),
]
Biases: TypeAlias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(as_biases, json_schema_input_type=dict[str, float] | None),
]
Content: TypeAlias = Annotated[
    str,
    PlainValidator(as_content, json_schema_input_type=str | list[dict[str, Any]] | None),
]
Thoughts: TypeAlias = Annotated[str | None, PlainValidator(as_thoughts, json_schema_input_type=Any)]
Prompts: TypeAlias = Annotated[
    list[Prompt],
    PlainValidator(
        as_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]
    ),
]
ResponseFormat: TypeAlias = Annotated[
    Mapping[str, Any] | None,
    PlainValidator(as_response_format, json_schema_input_type=dict[str, Any] | None),
]
JsonSchema: TypeAlias = Annotated[
    Mapping[str, Any] | None,
    PlainValidator(as_schema, json_schema_input_type=dict[str, Any] | str | None),
]
Parameters: TypeAlias = Annotated[
    Mapping[str, Any] | None,
    PlainValidator(as_parameters, json_schema_input_type=dict[str, Any] | None),
]
Choices: TypeAlias = Annotated[
    tuple[str, ...] | None,
    PlainValidator(as_choices, json_schema_input_type=list[str] | None),
]
ToolChoice: TypeAlias = Annotated[
    tuple[str, frozenset[str] | None],
    PlainValidator(as_tool_choice, json_schema_input_type=str | dict[str, Any] | None),
]
TemplateKwargs: TypeAlias = Annotated[
    Mapping[str, Any],
    PlainValidator(as_template_kwargs, json_schema_input_type=dict[str, Any] | None),
]
Arguments: TypeAlias = Annotated[
    dict[str, Any] | str,
    PlainValidator(as_arguments, json_schema_input_type=str | dict[str, Any] | None),
]

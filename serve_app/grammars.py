"""What structured output a request asks for, as a grammar for the engine.

Everything that can be wrong with it is found here, before the answer begins. The grammars'
form is llguidance's (`replica.grammars`). The module does not know how tokens are limited.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from serve_app.errors import invalid
from serve_app.protocol import ChatRequest, Function, GenerationRequest
from serve_app.tool_calls import END, HEAD, MARK, MIDDLE

MAX_CHARS = 64 * 1024
"""Of a grammar in its final form. A larger one would take long to compile."""


# As Python's json writes it. Were any whitespace allowed, a small model might never stop.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


async def grammar_of(request: GenerationRequest) -> str:
    """ "" if the output is free. Raises ApiError, naming the field, for what cannot be followed."""
    asked = request.structure
    if isinstance(request, ChatRequest) and request.offered_tools:
        param, grammar = "tools", _of_tools(request, asked[1] if asked else None)
    elif asked is not None:
        param, grammar = asked[0], _of_field(*asked)
    else:
        return ""
    if len(grammar) > MAX_CHARS:
        raise invalid(f"{param} is larger than {MAX_CHARS} characters", param)
    # In a thread: it may take tens of milliseconds, and releases the interpreter.
    error = await asyncio.to_thread(LLMatcher.validate_grammar, grammar)
    if error:
        raise invalid(_told(param, error), param)
    return grammar


def _of_field(param: str, value: Any) -> str:
    match param:
        case "guided_regex":
            return LLMatcher.grammar_from_regex(value)
        case "guided_grammar":
            return LLMatcher.grammar_from_lark(value)
        case "guided_choice":
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, value)))
    return LLMatcher.grammar_from_lark(f"start: {_json(value)}")


def _of_tools(request: ChatRequest, schema: Mapping[str, Any] | None) -> str:
    """Text, or JSON of the schema, or calls in the form of `serve_app.tool_calls`."""
    mark, tools = json.dumps(MARK), request.offered_tools
    single = request.tool_mode == "one" or request.parallel_tool_calls is False
    calls = "body" if single else "body more*"
    start = f"{mark} {calls}"
    if request.tool_mode == "auto":
        start = f"TEXT | head {calls}" if schema is None else f"{_json(schema)} | {start}"
    return LLMatcher.grammar_from_lark(
        "\n".join(
            [
                f"start: {start}",
                f"head[lazy]: TEXT {mark}",
                "TEXT: /(.|\\n)*/",
                f"more: {json.dumps(chr(10) + MARK)} body",
                f"body: {json.dumps(HEAD)} call {json.dumps(END)}",
                "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
                *(f"call_{number}: {_call(tool)}" for number, tool in enumerate(tools)),
            ]
        )
    )


def _call(tool: Function) -> str:
    schema = tool.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    return f"{json.dumps(tool.name + MIDDLE)} {_json(schema, lenient=not tool.strict)}"


def _json(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """In Lark's notation. `lenient` ignores what it cannot follow, as is usual for tools."""
    return "%json " + json.dumps({**schema, "x-guidance": {**SPACING, "lenient": lenient}})


def _told(param: str, error: str) -> str:
    """What a client may read: the library's words repeat what was sent."""
    if error.startswith("Unimplemented keys"):
        return f"{param} uses keywords of JSON Schema that are not supported"
    return f"{param} cannot be compiled"

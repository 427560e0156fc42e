"""What structured output a request asks for, as a grammar for the engine.

Everything that can be wrong with it is found here, before the answer begins. The grammars'
form is llguidance's (`replica.grammars`). The module does not know how tokens are limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from serve_app.backend import ServedModel
from serve_app.conversation import Function
from serve_app.errors import invalid
from serve_app.grammar_trial import GrammarTrial, TooComplex
from serve_app.protocol import ChatRequest, GenerationRequest
from serve_app.tool_calls import END, HEAD, MARK, MIDDLE

MAX_CHARS = 64 * 1024
"""Of a grammar in its final form. A larger one would take long to compile."""
MAX_REASON = 100
"""Characters that are told of why a grammar cannot be compiled."""
CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
"""Of ASCII, as JSON Schema's regular expressions have them; the library's are of Unicode."""


# As Python's json writes it. Were any whitespace allowed, a small model might never stop.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


async def grammar_of(request: GenerationRequest, model: ServedModel, trial: GrammarTrial) -> str:
    """Empty if the output is free. Raises ApiError, naming the field, for what it cannot be."""
    asked = request.structure
    if isinstance(request, ChatRequest) and request.offered_tools:
        param, grammar = "tools", _of_tools(request, asked[1] if asked else None)
    elif asked is not None:
        param, grammar = asked[0], _of_field(*asked)
    else:
        return ""
    if not model.grammars:
        raise invalid(f"{param} is not supported with this model", param, "unsupported_parameter")
    if len(grammar) > MAX_CHARS:
        raise invalid(f"{param} is larger than {MAX_CHARS} characters", param)
    try:
        error = await trial.error(grammar)
    except TooComplex:
        raise invalid(f"{param} is too complex to compile", param, "grammar_too_complex") from None
    if error:
        raise invalid(_told(param, error), param)
    return grammar


def _of_field(param: str, value: Any) -> str:
    match param:
        case "guided_regex":
            return LLMatcher.grammar_from_regex(_ascii_classes(value))
        case "guided_grammar":
            return LLMatcher.grammar_from_lark(value)
        case "guided_choice":
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, value)))
    return LLMatcher.grammar_from_lark(f"start: {_json(value)}")


def _ascii_classes(regex: str) -> str:
    """They may stand within brackets, too: the library's classes nest."""
    return re.sub(r"\\(.)", lambda found: CLASSES.get(found[1], found[0]), regex, flags=re.DOTALL)


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
    schema = tool.parameters or {"properties": {}, "additionalProperties": False}
    schema = {**schema, "type": "object"}
    return f"{json.dumps(tool.name + MIDDLE)} {_json(schema, lenient=not tool.strict)}"


def _json(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """In Lark's notation. `lenient` ignores what it cannot follow, as is usual for tools."""
    return "%json " + json.dumps({**schema, "x-guidance": {**SPACING, "lenient": lenient}})


def _told(param: str, error: str) -> str:
    """The library's reason, and not the rest of its words, which repeat all that was sent."""
    if found := re.search(r"Unimplemented keys: (\[.*\])", error):
        names = found[1].replace('"', "")[:MAX_REASON]
        return f"{param} uses keywords of JSON Schema that are not supported: {names}"
    marked = re.search(r"^error: (.+)$", error, re.MULTILINE)
    reason = marked[1] if marked else error.partition("\n")[0].rpartition("JSON schema: ")[2]
    reason = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "..."
    return f"{param} cannot be compiled: {reason}"

"""What structured output a request asks for, as a grammar for the engine.

Everything that can be wrong with it is found here, before the answer begins. The grammars'
form is llguidance's (`replica.grammars`). The module does not know how tokens are limited.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from llguidance import LLMatcher

from serve_app.errors import invalid
from serve_app.protocol import GenerationRequest

MAX_CHARS = 64 * 1024
"""Of a grammar in its final form. A larger one would take long to compile."""


async def grammar_of(request: GenerationRequest) -> str:
    """ "" if the output is free. Raises ApiError, naming the field, for what cannot be followed."""
    asked = request.structure
    if asked is None:
        return ""
    param, value = asked
    grammar = _grammar(param, value)
    if len(grammar) > MAX_CHARS:
        raise invalid(f"{param} is larger than {MAX_CHARS} characters", param)
    # In a thread: it may take tens of milliseconds, and releases the interpreter.
    error = await asyncio.to_thread(LLMatcher.validate_grammar, grammar)
    if error:
        raise invalid(_told(param, error), param)
    return grammar


def _grammar(param: str, value: Any) -> str:
    match param:
        case "guided_regex":
            return LLMatcher.grammar_from_regex(value)
        case "guided_grammar":
            return LLMatcher.grammar_from_lark(value)
        case "guided_choice":
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, value)))
    return LLMatcher.grammar_from_json_schema(
        json.dumps(value),
        # As Python's json writes it. Were any whitespace allowed, a small model might never stop.
        overrides={
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        },
    )


def _told(param: str, error: str) -> str:
    """What a client may read: the library's words repeat what was sent."""
    if error.startswith("Unimplemented keys"):
        return f"{param} uses keywords of JSON Schema that are not supported"
    return f"{param} cannot be compiled"

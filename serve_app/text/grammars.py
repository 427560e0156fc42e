"""What structured output a request asks for, as a grammar for the engine.

Everything that can be wrong with it is found here, before the answer begins. The grammars'
form is llguidance's (`replica.sampling.grammars`). The module does not know how tokens are limited.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from llguidance import LLMatcher

from serve_app.protocol.backend import ServedModel
from serve_app.protocol.conversation import Function
from serve_app.protocol.errors import ApiError, invalid
from serve_app.protocol.requests import ChatRequest, GenerationRequest
from serve_app.text.call_forms import HERMES, CallForm
from serve_app.text.grammar_trial import SPECIAL, TooComplex, Try
from serve_app.text.json_schemas import Schema, without_annotations, without_fine_print
from serve_app.text.tool_grammar import json_rule, tool_grammar
from serve_app.throttling.fair_work import Run, in_thread

logger = logging.getLogger(__name__)

MAX_CHARS = 64 * 1024
"""Of a grammar in its final form. A larger one would take long to compile."""
MAX_LOGGED = 100
"""Different reasons that the log keeps apart."""
SEARCH_S = 1.0
"""Time to find out which tool's schema cannot be followed."""
NO_ARGUMENTS: Schema = {"properties": {}, "additionalProperties": False}
TOO_COMPLEX = "grammar_too_complex"
CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
"""Of ASCII, as JSON Schema's regular expressions have them; the library's are of Unicode."""


async def grammar_of(
    request: GenerationRequest,
    model: ServedModel,
    trial: Try,
    run: Run = in_thread,
    form: CallForm = HERMES,
) -> str:
    """Empty if the output is free. run: does what takes long. form: in which tools are called.
    Raises ApiError, naming the field, for what the output cannot be."""
    asked = request.structure
    tools = request.offered_tools if isinstance(request, ChatRequest) else []
    if not tools and asked is None:
        return ""
    param = asked[0] if asked and not tools else "tools"
    if not model.grammars:
        raise invalid(f"{param} is not supported with this model", param, "unsupported_parameter")
    if isinstance(request, ChatRequest) and tools:
        return await _of_tools(request, trial, run, form.within(model.vocab_size))
    assert asked is not None
    grammar = await run(partial(_of_field, *asked))
    if fault := await _fault(param, grammar, trial):
        raise fault
    return grammar


async def _fault(param: str, grammar: str, trial: Try) -> ApiError | None:
    """Why a grammar cannot be followed. Raises ApiError for one that is too large to be tried."""
    if len(grammar) > MAX_CHARS:
        raise invalid(f"{param} is larger than {MAX_CHARS} characters", param)
    try:
        error = await trial(grammar)
    except TooComplex:
        return invalid(f"{param} is too complex to compile", param, TOO_COMPLEX)
    return invalid(f"{param} cannot be compiled: {error}", param) if error else None


async def _of_tools(request: ChatRequest, trial: Try, run: Run, form: CallForm) -> str:
    """Tools that are not strict are held to as much of their schemas as can be followed."""
    make = partial(
        tool_grammar,
        schema=without_annotations(request.structure[1]) if request.structure else None,
        forced=request.tool_mode != "auto",
        single=request.tool_mode == "one" or request.parallel_tool_calls is False,
    )
    # They may be megabytes until it is known that they are too large.
    tools = await run(partial(_without_annotations, request.offered_tools))
    # The trial has no tokens but bytes and a few special ones.
    tried = replace(form, special=tuple((text, SPECIAL) for text, _ in form.special))
    fault = await _fault("tools", await run(partial(make, tools, tried)), trial)
    if fault and not all(tool.strict for tool in tools):
        _log_once(f"not every schema of a tool can be followed: {fault.message}")
        tools = await _loosened(tools, trial, all_of_them=fault.code == TOO_COMPLEX)
        fault = await _fault("tools", make(tools, tried), trial)
    if fault:
        raise fault
    return make(tools, form)


async def _loosened(tools: list[Function], trial: Try, *, all_of_them: bool) -> list[Function]:
    """Those that are not strict with schemas that compile by themselves: whole, without what a
    compiler may refuse, or of any object."""
    ends = time.monotonic() + (0 if all_of_them else SEARCH_S)
    return [tool if tool.strict else await _compilable(tool, trial, ends) for tool in tools]


async def _compilable(tool: Function, trial: Try, ends: float) -> Function:
    """Accepts any object where nothing better is found in time."""
    whole = dict(tool.parameters or {})
    for schema in (whole, without_fine_print(whole)):
        if time.monotonic() >= ends:
            break
        rule = LLMatcher.grammar_from_lark(f"start: {json_rule(schema, lenient=True)}")
        if not await _fault("tools", rule, trial):
            return _with(tool, schema)
    return _with(tool, {"type": "object"})


def _without_annotations(tools: list[Function]) -> list[Function]:
    """Each has a schema of objects: a tool without one takes no arguments."""
    schemas = [tool.parameters or NO_ARGUMENTS for tool in tools]
    return [
        _with(tool, {**without_annotations(schema), "type": "object"})
        for tool, schema in zip(tools, schemas, strict=True)
    ]


def _with(tool: Function, schema: Schema) -> Function:
    return tool.model_copy(update={"parameters": schema})


@lru_cache(MAX_LOGGED)
def _log_once(message: str) -> None:
    logger.warning(message)


def _of_field(param: str, value: Any) -> str:
    match param:
        case "guided_regex":
            return LLMatcher.grammar_from_regex(_ascii_classes(value))
        case "guided_grammar":
            return LLMatcher.grammar_from_lark(value)
        case "guided_choice":
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, value)))
    return LLMatcher.grammar_from_lark(f"start: {json_rule(without_annotations(value))}")


def _ascii_classes(regex: str) -> str:
    """They may stand within brackets, too: the library's classes nest."""
    return re.sub(r"\\(.)", lambda found: CLASSES.get(found[1], found[0]), regex, flags=re.DOTALL)

"""The grammar of an answer that may call tools: text, or JSON, or calls in the form of a model.

A call is held to its form and its arguments to a schema, so that calls can be read while they are
generated (`serve_app.text.tool_calls`). The module knows no requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from serve_app.protocol.conversation import Function
from serve_app.text.call_forms import LEAD, MAX_LEAD, CallForm

# As Python's json writes it. Were any whitespace allowed, a small model might never stop.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """In Lark's notation. `lenient` ignores what it cannot follow, as is usual for tools."""
    return "%json " + json.dumps({**schema, "x-guidance": {**SPACING, "lenient": lenient}})


def tool_grammar(
    tools: Sequence[Function],
    form: CallForm,
    *,
    schema: Mapping[str, Any] | None = None,
    forced: bool = False,
    single: bool = False,
) -> str:
    """Calls if they are forced; else text, or JSON of the schema if there is one, or calls.

    tools: their parameters are schemas of objects.
    """
    return LLMatcher.grammar_from_lark("\n".join(_rules(tools, form, schema, forced, single)))


def _rules(
    tools: Sequence[Function],
    form: CallForm,
    schema: Mapping[str, Any] | None,
    forced: bool,
    single: bool,
) -> Iterator[str]:
    if forced:
        yield f"start: {'' if form.bare else _literal(form.mark, form)} calls"
    elif schema is not None:
        yield f"start: {json_rule(schema)} | {_literal(form.mark, form)} calls"
    else:
        yield from _beside_text(tools, form)
    more = "" if single or form.single else " more*"
    yield f"calls: {_literal(form.open, form)} call{more} {_literal(form.close, form)}"
    yield f"more: {_literal(form.between, form)} call"
    yield "call: " + " | ".join(f"call_{number}" for number in range(len(tools)))
    for number, tool in enumerate(tools):
        yield f"call_{number}: {_literal(_head(tool, form), form)} rest_{number}"
        arguments = json_rule(tool.parameters or {}, lenient=not tool.strict)
        yield f"rest_{number}: {arguments} {_literal(form.end, form)}"


def _beside_text(tools: Sequence[Function], form: CallForm) -> Iterator[str]:
    """Calls behind a mark, which may be a token of its own or spelled in letters; or from the
    answer's beginning, where that looks like one."""
    starts = ["TEXT", "lead calls"]
    if form.mark in dict(form.special):
        starts.append(f"TEXT {_literal(form.mark, form)} calls")
    if form.bare:
        starts += [f"BARE_{number} rest_{number}" for number in range(len(tools))]
    yield f"start: {' | '.join(starts)}"
    yield f"lead[lazy]: TEXT {json.dumps(form.mark)}"
    yield "ANY: /(.|\\n)*/"
    yield f"TEXT: ANY{' & ~(BARE ANY)' if form.bare else ''}"
    if form.bare:
        yield f"SPACE: /[{LEAD}]{{0,{MAX_LEAD}}}/".replace("\n", "\\n")
        yield "BARE: " + " | ".join(f"BARE_{number}" for number in range(len(tools)))
        for number, tool in enumerate(tools):
            yield f"BARE_{number}: SPACE {json.dumps(_head(tool, form))}"


def _head(tool: Function, form: CallForm) -> str:
    return form.head + tool.name + form.middle


def _literal(text: str, form: CallForm) -> str:
    """A text of the form, whose special tokens are themselves and not their letters."""
    ids = dict(form.special)
    pieces = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    written = [
        f"<[{ids[piece]}]>" if piece in ids else json.dumps(piece) for piece in pieces if piece
    ]
    return " ".join(written) or '""'

"""How an answer calls tools: as text, which the models of a family were trained to write.

A form is data. Grammars hold answers to it (`serve_app.text.grammars`), calls are read by it
(`serve_app.text.tool_calls`), and a chat template tells which one its model knows
(`serve_app.text.templates`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_LEAD = 8
"""White space before a call that begins an answer without a mark."""
LEAD = " \n"
"""What that white space is."""


@dataclass(frozen=True)
class CallForm:
    """`mark open call between call ... close`, where a call is `head NAME middle ARGUMENTS end`.

    ARGUMENTS are a JSON object, as Python's json writes it.
    """

    mark: str
    """Where it comes in an answer, calls begin."""
    open: str
    head: str
    middle: str
    end: str
    between: str
    close: str
    bare: bool = False
    """A call that begins the answer has no mark."""
    single: bool = False
    """The model makes one call at a time."""
    special: tuple[tuple[str, int], ...] = ()
    """Tokens that stand for pieces of the form and are no ordinary text: (text, id)."""

    def marked(self) -> CallForm:
        """For answers in which nothing but its mark tells a call from other text."""
        return replace(self, bare=False)

    def within(self, vocab_size: int) -> CallForm:
        """For a model that has no other tokens: what is beyond is spelled."""
        return replace(self, special=tuple(one for one in self.special if one[1] < vocab_size))

    def written(self, name: str, arguments: str) -> str:
        """One call. arguments: JSON."""
        return self.opened(name, arguments) + self.end + self.close

    def opened(self, name: str, arguments: str) -> str:
        """A call up to the end of its arguments."""
        mark = "" if self.bare else self.mark
        return mark + self.open + self.head + name + self.middle + arguments


HERMES = CallForm(
    mark="<tool_call>",
    open="",
    head='\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
    between="\n<tool_call>",
    close="",
)
"""The form of Hermes and Qwen models, and of every model whose template shows no other one."""
MISTRAL = CallForm(
    mark="[TOOL_CALLS]",
    open=" [",
    head='{"name": "',
    middle='", "arguments": ',
    end="}",
    between=", ",
    close="]",
)
NEMO = CallForm(
    mark="[TOOL_CALLS]",
    open="[",
    head='{"name": "',
    middle='", "arguments": ',
    end="}",
    between=", ",
    close="]",
)
"""As Mistral's, without the space."""
LLAMA = CallForm(
    mark="<|python_tag|>",
    open="",
    head='{"name": "',
    middle='", "parameters": ',
    end="}",
    between="",
    close="",
    bare=True,
    single=True,
)
"""The form of Llama 3."""
FORMS = (HERMES, MISTRAL, NEMO, LLAMA)


def form_in(text: str, name: str, arguments: str) -> CallForm | None:
    """The form of a call that a text holds, if it is a known one."""
    return next((form for form in FORMS if form.opened(name, arguments) in text), None)


def instructions(tools: Sequence[Mapping[str, Any]], form: CallForm = HERMES) -> str:
    """For models whose chat template does not know tools."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = form.written("NAME", "{...}")
    return f"You may call these tools:\n{listed}\nTo call one, answer with\n{example}"

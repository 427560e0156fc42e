"""Calls of tools inside the text of an answer: how they are written, and how they are read.

An answer calls a tool in the form that Hermes and Qwen models were trained on:

    <tool_call>
    {"name": "NAME", "arguments": {...}}
    </tool_call>

A grammar holds the model to exactly these characters (`serve_app.grammars`), so they can be read
piece by piece without parsing JSON. The module knows text only.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from serve_app.stop_strings import overlap

MARK = "<tool_call>"
HEAD = '\n{"name": "'
MIDDLE = '", "arguments": '
END = "}\n</tool_call>"
"""No JSON string holds a raw line break, so arguments never contain it."""


class CallDelta(NamedTuple):
    """A call begins, or more of its arguments."""

    number: int
    """Among the calls of one answer."""
    id: str | None
    """Of a call that begins, as is the name."""
    name: str | None
    arguments: str


def written(name: str, arguments: str) -> str:
    """A call as text. arguments: JSON."""
    return MARK + HEAD + name + MIDDLE + arguments + END


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """For models whose chat template does not know tools."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    form = written("NAME", "{...}")
    return f"You may call these tools:\n{listed}\nTo call one, answer with\n{form}"


class ToolCallReader:
    """Reads one answer. What may turn out to be a mark is held back."""

    def __init__(self) -> None:
        self.calls = 0
        """Begun so far."""
        self._buffer = ""
        self._reading = "content"

    def push(self, text: str, *, last: bool) -> tuple[str, list[CallDelta]]:
        """(content, calls) that are certain now; all that is left with the last text."""
        self._buffer += text
        content = ""
        deltas: list[CallDelta] = []
        for part in self._parts(last):
            if isinstance(part, CallDelta):
                if deltas and deltas[-1].number == part.number:
                    before = deltas.pop()
                    part = before._replace(arguments=before.arguments + part.arguments)
                deltas.append(part)
            elif not self.calls:  # between calls there is but a line break
                content += part
        return content, deltas

    def _parts(self, last: bool) -> Iterator[str | CallDelta]:
        while self._buffer:
            before = len(self._buffer), self._reading
            if self._reading == "content":
                yield self._until(MARK, "name", last)
            elif self._reading == "name":
                yield from self._begin()
            else:
                if arguments := self._until(END, "content", last):
                    yield CallDelta(self.calls - 1, None, None, arguments)
            if before == (len(self._buffer), self._reading):
                return

    def _until(self, mark: str, following: str, last: bool) -> str:
        """Take what comes before the mark, and the mark."""
        found, mark_found, rest = self._buffer.partition(mark)
        if mark_found:
            self._buffer, self._reading = rest, following
            return found
        held = 0 if last else overlap(self._buffer, mark)
        cut = len(self._buffer) - held
        taken, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return taken

    def _begin(self) -> Iterator[CallDelta]:
        name, complete, rest = self._buffer.partition(MIDDLE)
        if complete:
            self._buffer, self._reading = rest, "arguments"
            self.calls += 1
            yield CallDelta(self.calls - 1, f"call_{uuid.uuid4().hex}", name[len(HEAD) :], "")

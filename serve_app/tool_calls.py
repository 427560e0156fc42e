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
CLOSE = "\n</tool_call>"
END = "}" + CLOSE


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
    """Reads one answer, which may end anywhere. What may turn out to be a mark is held back."""

    def __init__(self, *, only_calls: bool = False) -> None:
        """only_calls: the answer is held to calls, so that even half a mark is no content."""
        self.calls = 0
        """Begun so far."""
        self._only_calls = only_calls
        self._buffer = ""
        self._reading = "content"
        self._arguments = _Arguments()

    @property
    def is_complete(self) -> bool:
        """There are calls, and all can be made: the last one has all of its arguments."""
        return self.calls > 0 and self._arguments.are_complete

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
            elif self._reading == "arguments":
                yield from self._go_on()
            else:
                self._until(CLOSE, "content", last)
            if before == (len(self._buffer), self._reading):
                return

    def _until(self, mark: str, following: str, last: bool) -> str:
        """Take what comes before the mark, and the mark."""
        found, mark_found, rest = self._buffer.partition(mark)
        if mark_found:
            self._buffer, self._reading = rest, following
            return found
        held = overlap(self._buffer, mark) if self._only_calls or not last else 0
        cut = len(self._buffer) - held
        taken, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return taken

    def _begin(self) -> Iterator[CallDelta]:
        name, complete, rest = self._buffer.partition(MIDDLE)
        if complete:
            self._buffer, self._reading = rest, "arguments"
            self.calls += 1
            self._arguments = _Arguments()
            yield CallDelta(self.calls - 1, f"call_{uuid.uuid4().hex}", name[len(HEAD) :], "")

    def _go_on(self) -> Iterator[CallDelta]:
        arguments, self._buffer = self._arguments.split(self._buffer)
        if self._buffer:
            self._reading = "close"
        if arguments:
            yield CallDelta(self.calls - 1, None, None, arguments)


class _Arguments:
    """Follows the arguments of one call: JSON inside the object that is the call."""

    def __init__(self) -> None:
        self.are_complete = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def split(self, text: str) -> tuple[str, str]:
        """(what belongs to them, what comes behind them: it begins with the call's own brace)."""
        for place, character in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            elif character == "{":
                self._depth += 1
            elif character == "}":
                if not self._depth:
                    self.are_complete = True
                    return text[:place], text[place:]
                self._depth -= 1
                self.are_complete = not self._depth
        return text, ""

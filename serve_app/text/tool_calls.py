"""Calls of tools inside the text of an answer, as they are read.

A grammar holds the model to exactly the characters of a form (`serve_app.text.call_forms`,
`serve_app.text.grammars`), so calls can be read piece by piece without parsing JSON. The module
knows text only.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from serve_app.text.call_forms import HERMES, LEAD, MAX_LEAD, CallForm
from serve_app.text.stop_strings import overlap


class CallDelta(NamedTuple):
    """A call begins, or more of its arguments."""

    number: int
    """Among the calls of one answer."""
    id: str | None
    """Of a call that begins, as is the name."""
    name: str | None
    arguments: str


class ToolCallReader:
    """Reads one answer, which may end anywhere. What may turn out to be a call is held back."""

    def __init__(
        self,
        form: CallForm = HERMES,
        names: Sequence[str] = (),
        *,
        only_calls: bool = False,
        only_first: bool = False,
    ) -> None:
        """names: of the tools. only_calls: the answer is held to calls, so that even half a mark
        is no content. only_first: it begins with calls or is JSON, whose texts may hold a mark."""
        self.calls = 0
        """Begun so far."""
        self._form = form
        self._heads = [form.head + name + form.middle for name in names] if form.bare else []
        self._heads += [form.mark] if only_first else []
        self._otherwise = "text" if only_first else "content"
        self._only_calls = only_calls
        self._buffer = ""
        self._reading = "start" if self._heads else self._otherwise
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
            else:
                content += part
        return content, deltas

    def _parts(self, last: bool) -> Iterator[str | CallDelta]:
        while self._buffer:
            before = len(self._buffer), self._reading
            match self._reading:
                case "start":
                    self._start(last)
                case "content":
                    yield self._until_mark(last)
                case "text":
                    yield self._buffer
                    self._buffer = ""
                case "call":
                    yield from self._begin()
                case "arguments":
                    yield from self._go_on()
                case "between":
                    self._pass()
                case _:  # behind the last call
                    self._buffer = ""
            if before == (len(self._buffer), self._reading):
                return

    def _start(self, last: bool) -> None:
        """What only an answer's beginning tells: a call without a mark, or JSON."""
        head = self._buffer.lstrip(LEAD)
        is_late = len(self._buffer) - len(head) > MAX_LEAD
        if not is_late and any(head.startswith(known) for known in self._heads):
            self._buffer, self._reading = head.removeprefix(self._form.mark), "call"
        elif is_late or not any(known.startswith(head) for known in self._heads):
            self._reading = self._otherwise
        elif last:
            self._buffer = "" if self._only_calls else self._buffer
            self._reading = self._otherwise

    def _until_mark(self, last: bool) -> str:
        """Take what comes before the mark, and the mark."""
        found, mark_found, rest = self._buffer.partition(self._form.mark)
        if mark_found:
            self._buffer, self._reading = rest, "call"
            return found
        held = overlap(self._buffer, self._form.mark) if self._only_calls or not last else 0
        cut = len(self._buffer) - held
        taken, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return taken

    def _begin(self) -> Iterator[CallDelta]:
        head, complete, rest = self._buffer.partition(self._form.middle)
        if complete:
            name = head.rpartition(self._form.head)[2]
            self._buffer, self._reading = rest, "arguments"
            self.calls += 1
            self._arguments = _Arguments()
            yield CallDelta(self.calls - 1, f"call_{uuid.uuid4().hex}", name, "")

    def _go_on(self) -> Iterator[CallDelta]:
        arguments, self._buffer = self._arguments.split(self._buffer)
        if self._buffer:
            self._reading = "between"
        if arguments:
            yield CallDelta(self.calls - 1, None, None, arguments)

    def _pass(self) -> None:
        """What stands between two calls, or behind the last one."""
        expected = self._form.end + self._form.between
        if self._form.between and self._buffer.startswith(expected):
            self._buffer, self._reading = self._buffer[len(expected) :], "call"
        elif not expected.startswith(self._buffer):
            self._reading = "end"


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

"""Splits what a model thinks from what it says, by the tags that it was trained to write.

The module knows text only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from serve_app.text.stop_strings import overlap


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around a model's thoughts, which come first. Raises ValueError for an empty one."""

    # Read by pydantic where the application nests this class in its own settings.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    start: str = "<think>"
    """Before the thoughts."""
    end: str = "</think>"
    """Behind them."""

    def __post_init__(self) -> None:
        if not (self.start and self.end):
            raise ValueError("the tags around reasoning must not be empty")

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends within the thoughts: some templates begin them."""
        return prompt.rstrip().endswith(self.start)


class ReasoningReader:
    """Reads one answer. What may turn out to be a tag is held back, and so is white space around
    the tags."""

    def __init__(self, tags: ReasoningTags, *, is_open: bool) -> None:
        self._tags = tags
        self._buffer = ""
        self._reading = "thoughts" if is_open else "start"
        self._at_edge = True
        """Nothing was told yet of the part that is being read."""

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """(thoughts, content) that are certain now; all that is left with the last text."""
        self._buffer += text
        if self._reading == "start":
            self._begin(last)
        thoughts = self._think(last) if self._reading == "thoughts" else ""
        content = ""
        if self._reading == "content":
            content, self._buffer = self._trimmed(self._buffer), ""
        return thoughts, content

    def _begin(self, last: bool) -> None:
        """An answer that does not begin with the tag is content, white space and all."""
        head, start = self._buffer.lstrip(), self._tags.start
        if head.startswith(start):
            self._buffer, self._reading = head[len(start) :], "thoughts"
        elif last or not start.startswith(head):
            self._reading, self._at_edge = "content", False

    def _think(self, last: bool) -> str:
        thoughts, ended, rest = self._buffer.partition(self._tags.end)
        if ended:
            thoughts = self._trimmed(thoughts.rstrip())
            self._buffer, self._reading, self._at_edge = rest, "content", True
            return thoughts
        # White space may be the last before the tag.
        held = 0 if last else overlap(self._buffer, self._tags.end)
        certain = self._buffer[: len(self._buffer) - held]
        if not last:
            certain = certain.rstrip()
        self._buffer = self._buffer[len(certain) :]
        return self._trimmed(certain)

    def _trimmed(self, text: str) -> str:
        if self._at_edge:
            text = text.lstrip()
            self._at_edge = not text
        return text

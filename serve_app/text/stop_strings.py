"""Ends a text at the first stop string, whatever pieces it arrives in.

A stop string matches where it first ends, so the result is a function of the text alone; of
several that end at one place the longest counts. Only characters that may turn out to begin a
stop string are held back. The module knows text only.
"""

from __future__ import annotations


class StopStrings:
    """Follows one text. `stops` are not empty; `include` keeps the match in the text."""

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched = False
        """A stop string was found: the text is complete, and nothing may be pushed any more."""

    def push(self, text: str) -> str:
        """The text that is certain now; after a match, its end."""
        buffer = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            lengths = [m.length for m in self._matchers if m.completes(character)]
            if lengths:
                self.matched, self._held = True, ""
                return buffer[: end if self._include else end - max(lengths)]
        certain = len(buffer) - max(matcher.matched for matcher in self._matchers)
        self._held = buffer[certain:]
        return buffer[:certain]

    def finish(self) -> str:
        """What was held back; the text ends here."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth-Morris-Pratt: the longest beginning of one string that the text ends with."""

    __slots__ = ("_borders", "_string", "length", "matched")

    def __init__(self, string: str) -> None:
        self._string = string
        self._borders = _borders(string)
        self.length = len(string)
        self.matched = 0

    def completes(self, character: str) -> bool:
        """Take one more character; true where the whole string ends."""
        matched = self.matched
        while matched and self._string[matched] != character:
            matched = self._borders[matched - 1]
        self.matched = matched = matched + (self._string[matched] == character)
        return matched == self.length


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in string[1:]:
        border = borders[-1]
        while border and string[border] != character:
            border = borders[border - 1]
        borders.append(border + (string[border] == character))
    return borders


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that begins the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)

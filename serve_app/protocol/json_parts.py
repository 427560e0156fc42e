"""Counts what a JSON text holds before anything is built from it.

Eight megabytes are read within milliseconds where they are one text, and for half a second where
they are names and empty objects. numpy does the exact counting, mostly without the interpreter
lock. The module knows neither fields nor requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MAX_PARTS = 150_000
"""Strings, names, objects and lists; so many are read within some 50 ms. 2,048 turns and 128 tools
with a hundred fields each have fewer."""
MAX_VALUES = 1_000_000
"""Of any kind, mostly token ids. So many are read within 50 ms, too."""
QUOTE, COMMA = b'"', b","
OPENING = (b":", b"[", b"{")


class Parts(NamedTuple):
    parts: int
    values: int


def at_most(text: bytes) -> Parts:
    """Counted in a millisecond a megabyte, marks within strings included."""
    parts = text.count(QUOTE) // 2 + sum(map(text.count, OPENING))
    return Parts(parts, text.count(COMMA) + 1)


def exactly(text: bytes) -> Parts:
    """Marks within strings aside. Of a text that is not valid, right up to its first fault, where
    reading ends."""
    # Within a string a quote follows an odd number of backslashes, and none stands outside.
    plain = text.replace(rb"\\", b"__").replace(rb"\"", b"__")
    letters = np.frombuffer(plain, np.uint8)
    quotes = letters == ord(QUOTE)
    outside = np.cumsum(quotes, dtype=np.uint8) % 2 == 0
    opening = sum(int(np.count_nonzero((letters == ord(mark)) & outside)) for mark in OPENING)
    commas = int(np.count_nonzero((letters == ord(COMMA)) & outside))
    return Parts(int(np.count_nonzero(quotes)) // 2 + opening, commas + 1)


class Allowance:
    """What may still be read: `MAX_PARTS` and `MAX_VALUES` of all texts together."""

    def __init__(self) -> None:
        self._left = Parts(MAX_PARTS, MAX_VALUES)

    def covers(self, text: bytes) -> bool:
        """Whether it may be read; if so, less is left."""
        return self._take(at_most(text)) or self._take(exactly(text))

    def _take(self, counted: Parts) -> bool:
        left = Parts(self._left.parts - counted.parts, self._left.values - counted.values)
        if min(left) < 0:
            return False
        self._left = left
        return True

"""What a replica has probably cached: prefixes of prompts that were granted there lately.

A prompt names the hashes of its first 64, 128, 256, ... tokens, so that a dozen numbers stand for
any length, and a match is known to within a factor of two. Nothing is certain: the replica
evicts as it likes. Knows neither tenants nor tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

FIRST = 64
"""Tokens of the shortest prefix; each further one is twice as long."""


class PrefixIndex:
    """Hashes of one replica, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._tokens_of: OrderedDict[int, int] = OrderedDict()
        """Tokens that each prefix has beyond the next shorter one."""
        self._tokens = 0

    def match(self, prefixes: Sequence[int]) -> int:
        """Tokens of the longest prefix that was seen."""
        for index in range(len(prefixes) - 1, -1, -1):
            if prefixes[index] in self._tokens_of:
                return FIRST << index
        return 0

    def add(self, prefixes: Sequence[int], capacity: int) -> None:
        """A prompt runs here; what exceeds `capacity` tokens is forgotten."""
        tokens_of = self._tokens_of
        # Shorter ones are used whenever longer ones are: they stay longer.
        for index in range(len(prefixes) - 1, -1, -1):
            prefix = prefixes[index]
            if prefix not in tokens_of:
                tokens_of[prefix] = FIRST << max(index - 1, 0)
                self._tokens += tokens_of[prefix]
            tokens_of.move_to_end(prefix)
        while self._tokens > capacity and tokens_of:
            self._tokens -= tokens_of.popitem(last=False)[1]

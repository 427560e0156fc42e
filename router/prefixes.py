"""What replicas have probably cached: prefixes of prompts that were granted there lately.

A prompt names the hashes of its first 64, 128, 256, ... tokens, so that a dozen numbers stand for
any length, and a match is known to within a factor of two. Nothing is certain: the replica
evicts as it likes. Knows neither tenants nor tokens. A set of replicas is an int, see `loads.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

FIRST = 64
"""Tokens of the shortest prefix; each further one is twice as long."""


def longest_of(prefixes: Sequence[int]) -> int:
    """Tokens of the longest of a prompt's prefixes."""
    return FIRST << len(prefixes) >> 1 if prefixes else 0


class PrefixIndex:
    """Which replicas have which prefix."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        """No set is empty."""

    def __len__(self) -> int:
        """Prefixes that any replica has."""
        return len(self._holders)

    def matches(
        self, prefixes: Sequence[int], among: int, beyond: int = 0
    ) -> list[tuple[int, int]]:
        """Tokens of each prefix of more than `beyond` tokens that any of a set of replicas has,
        the longest first, and who of them has it."""
        found = []
        holders_of = self._holders
        for index in range(len(prefixes) - 1, (beyond // FIRST).bit_length() - 1, -1):
            holders = holders_of.get(prefixes[index], 0) & among
            if holders:
                found.append((FIRST << index, holders))
        return found

    def add(self, prefix: int, replica: int) -> None:
        self._holders[prefix] = self._holders.get(prefix, 0) | replica

    def remove(self, prefix: int, replica: int) -> None:
        rest = self._holders[prefix] & ~replica
        if rest:
            self._holders[prefix] = rest
        else:
            del self._holders[prefix]


class PrefixCache:
    """Prefixes of one replica, the least recently used forgotten first. The index hears of all."""

    def __init__(self, index: PrefixIndex, replica: int) -> None:
        self._index, self._replica = index, replica
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
            if prefix in tokens_of:
                tokens_of.move_to_end(prefix)
            else:
                tokens_of[prefix] = FIRST << max(index - 1, 0)
                self._tokens += tokens_of[prefix]
                self._index.add(prefix, self._replica)
        self.shrink(capacity)

    def shrink(self, capacity: int) -> None:
        """Forget what exceeds `capacity` tokens."""
        while self._tokens > capacity and self._tokens_of:
            prefix, tokens = self._tokens_of.popitem(last=False)
            self._tokens -= tokens
            self._index.remove(prefix, self._replica)

"""Sets of replicas, and replicas in the order of their load.

A set of replicas is an int with a bit for each: what two sets have in common is one operation,
however many replicas there are. The module knows neither requests nor what a load is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class LoadOrder:
    """Replicas, each a bit, by load. A change costs O(log loads), the next of a set O(loads), with
    as many loads as differ: few, as work goes where there is least of it."""

    def __init__(self) -> None:
        self._load_of: dict[int, float] = {}
        self._with_load: dict[float, int] = {}
        """The replicas of each load; none of these sets is empty."""
        self._loads: list[float] = []
        """Sorted."""

    def add(self) -> int:
        """A new replica, without load yet: the lowest bit that nobody has."""
        taken = sum(self._load_of)
        bit = ~taken & (taken + 1)
        self._insert(bit, 0.0)
        return bit

    def remove(self, bit: int) -> None:
        load = self._load_of.pop(bit)
        rest = self._with_load[load] & ~bit
        if rest:
            self._with_load[load] = rest
        else:
            del self._with_load[load], self._loads[bisect_left(self._loads, load)]

    def move(self, bit: int, load: float) -> None:
        """A replica has another load now."""
        if load != self._load_of[bit]:
            self.remove(bit)
            self._insert(bit, load)

    def sort(self, members: int) -> Iterator[int]:
        """The replicas of a set, the least loaded first, the lowest bit among equals."""
        for load in self._loads:
            found = members & self._with_load[load]
            members &= ~found
            while found:
                bit = found & -found
                yield bit
                found ^= bit
            if not members:
                return

    def _insert(self, bit: int, load: float) -> None:
        self._load_of[bit] = load
        others = self._with_load.get(load, 0)
        if not others:
            insort(self._loads, load)
        self._with_load[load] = others | bit

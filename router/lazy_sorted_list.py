"""Items in the order of keys that change while they are in it.

It knows nothing of tenants. A rise of a key costs nothing until the item is looked at; a fall must
be announced by `touch`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from itertools import count
from math import inf
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Entry = tuple[float, int, Item]


class LazySortedList(Generic[Item]):
    """Orders by `key(item)`, first come first among equals. Items for which `live` has turned
    false drop out unannounced. Amortised O(log n) comparisons per change; what moves in memory is
    O(n) in name only."""

    def __init__(self, key: Callable[[Item], float], live: Callable[[Item], bool]) -> None:
        self._key = key
        self._live = live
        self._ticks = count()
        self._entries: list[Entry[Item]] = []
        """Sorted by key and arrival, both negated: the first item is at the end, where it is
        cheap to take out."""
        self._entry_of: dict[Item, Entry[Item]] = {}
        """The key of an entry is never above its item's true key."""

    def __len__(self) -> int:
        return len(self._entries)

    def touch(self, item: Item) -> None:
        """Announce a live item that is new or whose key may have fallen."""
        key = self._key(item)
        entry = self._entry_of.get(item)
        if entry is None or key < -entry[0]:
            self.drop(item)
            self._insert(item, key)

    def peek(self) -> Item | None:
        """The live item with the smallest key."""
        found = self.first(1)
        return found[0] if found else None

    def first(self, limit: int, span: float = inf) -> list[Item]:
        """The `limit` live items with the smallest keys, but none more than `span` above the
        least."""
        entries, found, ceiling = self._entries, list[Item](), inf
        end = len(entries)
        while end and len(found) < limit:
            entry = entries[end - 1]
            item = entry[2]
            if not self._live(item):
                del entries[end - 1], self._entry_of[item]
                end -= 1
            elif (key := self._key(item)) > -entry[0]:
                del entries[end - 1]
                self._insert(item, key)  # at or before `end`: what comes next is there again
            elif key > ceiling:
                break
            else:
                if not found:
                    ceiling = key + span
                found.append(item)
                end -= 1
        return found

    def pop(self) -> Item:
        """Remove and return what `peek` returns. Raises IndexError when there is none."""
        item = self.peek()
        if item is None:
            raise IndexError("pop from an empty order")
        self._entries.pop()
        del self._entry_of[item]
        return item

    def drop(self, item: Item) -> None:
        """Forget an item, live or not."""
        entry = self._entry_of.pop(item, None)
        if entry is not None:
            del self._entries[bisect_left(self._entries, entry)]

    def _insert(self, item: Item, key: float) -> None:
        entry = self._entry_of[item] = (-key, -next(self._ticks), item)
        insort(self._entries, entry)

"""A min-heap over items whose keys change while they are in it.

It knows nothing of tenants. A rise of a key costs nothing until the item reaches the top; a
fall must be announced by `touch` and costs one push.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class LazyHeap(Generic[Item]):
    """Orders by `key(item)`, first come first among equals. Items for which `live` has
    turned false drop out unannounced. Amortised O(log n) per change."""

    def __init__(self, key: Callable[[Item], float], live: Callable[[Item], bool]) -> None:
        self._key = key
        self._live = live
        self._ticks = count()
        self._heap: list[tuple[float, int, Item]] = []
        self._entries: dict[Item, float] = {}
        """Key of the one entry that counts for each item; never above its true key."""

    def __len__(self) -> int:
        """Entries held, outdated ones included."""
        return len(self._heap)

    def touch(self, item: Item) -> None:
        """Announce a live item that is new or whose key may have fallen."""
        key = self._key(item)
        entry = self._entries.get(item)
        if entry is None or key < entry:
            self._entries[item] = key
            heappush(self._heap, (key, next(self._ticks), item))
            if entry is not None:
                self._compact()

    def peek(self) -> Item | None:
        """The live item with the smallest key."""
        heap, entries = self._heap, self._entries
        while heap:
            entry, _, item = heap[0]
            if entries.get(item) != entry:
                heappop(heap)
            elif not self._live(item):
                heappop(heap)
                del entries[item]
            elif (key := self._key(item)) > entry:
                entries[item] = key
                heapreplace(heap, (key, next(self._ticks), item))
            else:
                return item
        return None

    def pop(self) -> Item:
        """Remove and return what `peek` returns. Raises IndexError when there is none."""
        item = self.peek()
        if item is None:
            raise IndexError("pop from an empty heap")
        heappop(self._heap)
        del self._entries[item]
        return item

    def drop(self, item: Item) -> None:
        """Forget an item, live or not."""
        if self._entries.pop(item, None) is not None:
            self._compact()

    def _compact(self) -> None:
        """One more entry is outdated: leave them out once they are the most."""
        entries = self._entries
        if len(self._heap) > 2 * len(entries) + 16:
            self._heap = [entry for entry in self._heap if entries.get(entry[2]) == entry[0]]
            heapify(self._heap)

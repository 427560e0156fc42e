"""What an ingress has waiting, and what of it Admission has not heard yet.

A sync shows all of it, or the changes since one that was answered: what has come since, and what
has left since, whether or not a sync between was lost. The module knows no network and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from router.messages import RequestInfo
from serve_app.fleet.request_state import Waiting

SMALL = 256
"""What so few have changed would save nothing."""


class Shown(NamedTuple):
    """Fields of a `Sync`, by their names there."""

    waiting: tuple[RequestInfo, ...]
    gone: tuple[str, ...] = ()
    base: int | None = None
    admitted: int = 0


class WaitingSet:
    """By request id, in the order in which they came. Syncs have growing numbers from 1 on."""

    def __init__(self, small: int = SMALL) -> None:
        """small: so many are shown whole each time."""
        self._small = small
        self._all: dict[str, Waiting] = {}
        self._fresh: dict[str, Waiting] = {}
        """In no sync that was answered."""
        self._left: dict[str, int] = {}
        """Since the last sync that was answered; and the first sync that said so, 0 before."""
        self._answered = 0
        self._base: int | None = None
        """The last sync that was answered; None if the next one is to show everything."""

    def __len__(self) -> int:
        return len(self._all)

    def values(self) -> Iterable[Waiting]:
        return self._all.values()

    def get(self, request_id: str) -> Waiting | None:
        return self._all.get(request_id)

    def add(self, waiting: Waiting) -> None:
        """A request, or another attempt of it."""
        request_id = waiting.request.request_id
        self._all.pop(request_id, None)
        self._all[request_id] = self._fresh[request_id] = waiting
        self._left.pop(request_id, None)

    def leave(self, request_id: str) -> Waiting | None:
        """It waits no more. Returns what it was, if it was anything."""
        waiting = self._all.pop(request_id, None)
        self._fresh.pop(request_id, None)
        if waiting is not None and waiting.shown_in:
            self._left[request_id] = 0
        return waiting

    def show_all(self) -> None:
        """Admission does not know what earlier syncs were about."""
        self._base = None

    def show(self, sequence: int) -> Shown:
        """What the next sync says."""
        for waiting in self._fresh.values():
            waiting.shown_in = waiting.shown_in or sequence
        for request_id, told in self._left.items():
            self._left[request_id] = told or sequence
        if self._base is None or len(self._all) <= self._small:
            every = self._all.values()
            admitted = sum(waiting.shown_in <= self._answered for waiting in every)
            return Shown(tuple(waiting.request for waiting in every), admitted=admitted)
        fresh = tuple(waiting.request for waiting in self._fresh.values())
        return Shown(fresh, tuple(self._left), self._base)

    def heard(self, sequence: int) -> list[Waiting]:
        """This sync was answered. Returns what was shown as waiting for the first time, and still
        does."""
        self._answered = self._base = sequence
        self._left = {name: told for name, told in self._left.items() if not told}
        heard = [waiting for waiting in self._fresh.values() if waiting.shown_in]
        self._fresh = {name: one for name, one in self._fresh.items() if not one.shown_in}
        return heard

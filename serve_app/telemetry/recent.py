"""The requests that ended last, by their ids: what administrators may ask about one.

Each process keeps its own, and Admission those of all. What there is room for is shared: who has
most of it loses its oldest first, so that nobody's flood drives out the requests of others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from serve_app.telemetry.records import RequestRecord

MOST = 1000
"""Requests that are kept of one process."""
MOST_OF_ALL = 10_000
"""Requests that Admission keeps, of all processes."""
FOUND = 20
"""Requests of one id that are told: a client may call all of its requests the same."""


class Ended(NamedTuple):
    """A request that is over."""

    source: str
    """The process that served it, and ..."""
    number: int
    """... which of its requests it was: both together name it."""
    tenant: str
    ids: tuple[str, ...]
    told: bytes
    """What is known of it, as JSON."""


class Recent:
    """By process and number, oldest first."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._ended: dict[tuple[str, int], Ended] = {}
        self._of_tenants: dict[str, deque[Ended]] = {}
        self._of_ids: dict[str, dict[tuple[str, int], Ended]] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, ended: Ended) -> None:
        """One that is known already is left alone."""
        key = ended.source, ended.number
        if key in self._ended:
            return
        self._ended[key] = ended
        self._of_tenants.setdefault(ended.tenant, deque()).append(ended)
        for name in ended.ids:
            self._of_ids.setdefault(name, {})[key] = ended
        if len(self._ended) > self._most:
            self._forget_one()

    def find(self, name: str) -> list[Ended]:
        """Those with that id, newest first, `FOUND` at most."""
        return list(reversed(self._of_ids.get(name, {}).values()))[:FOUND]

    def since(self, number: int) -> list[Ended]:
        """Those with a higher number, of a process that keeps its own alone."""
        return [ended for ended in self._ended.values() if ended.number > number]

    def _forget_one(self) -> None:
        tenant = max(self._of_tenants, key=lambda name: len(self._of_tenants[name]))
        oldest = self._of_tenants[tenant].popleft()
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]
        key = oldest.source, oldest.number
        del self._ended[key]
        for name in oldest.ids:
            named = self._of_ids[name]
            named.pop(key, None)
            if not named:
                del self._of_ids[name]


class OwnRecent:
    """Those of this process, and what Admission has been told of them."""

    def __init__(self, source: str) -> None:
        self._source, self._recent, self._number = source, Recent(), 0
        self._told, self._epoch = 0, 0
        """Number of the last one that Admission knows, and which Admission that is."""

    def note(self, record: RequestRecord) -> None:
        """A request is over. One that asked for no tokens and was answered is not worth a place."""
        if not record.sequences and record.outcome == "succeeded":
            return
        self._number += 1
        ids = tuple({name for name in (record.answer_id, record.request_id) if name})
        told = msgspec.json.encode(self._described(record))
        self._recent.add(Ended(self._source, self._number, record.tenant, ids, told))

    def find(self, name: str) -> list[Ended]:
        """See `Recent.find`."""
        return self._recent.find(name)

    def news(self) -> list[Ended]:
        """What Admission has not been told."""
        return self._recent.since(self._told)

    def told(self, news: Sequence[Ended], epoch: int) -> None:
        """The Admission of that epoch has taken them. To one that is new here, all is news."""
        if epoch != self._epoch:
            self._told, self._epoch = 0, epoch
        elif news:
            self._told = news[-1].number

    def _described(self, record: RequestRecord) -> dict[str, object]:
        fields = record.fields()
        fields.pop("answer_id", None)
        return {
            "id": record.answer_id or record.request_id,
            "request_id": record.request_id,
            "request": record.line,
            "state": "over",
            "tenant": record.tenant,
            "ingress": self._source,
            "ended_at": time.time(),
        } | fields


def merged(*several: Iterable[Ended]) -> list[Ended]:
    """Each once, in the order in which they come."""
    return list({(one.source, one.number): one for found in several for one in found}.values())

"""What administrators order while the service runs: tenants are paused, requests are stopped.

Admission keeps the orders and every ingress obeys them: one that was told of an order refuses
what comes and ends what it has. The module knows neither HTTP nor Ray.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from router.messages import LeaseInfo, RequestInfo, Sync
from serve_app.protocol.backend import Stopped

TOLD_S = 60.0
"""So long ingresses are told of a request that was stopped: an id never comes again."""
MAX_LISTED = 1000
"""Requests that are told at once."""


@dataclass(frozen=True, slots=True)
class Orders:
    paused: frozenset[str] = frozenset()
    """Tenants."""
    stopped: frozenset[str] = frozenset()
    """Ids of answers, or of one of their sequences."""

    def against_all_of(self, tenant: str) -> Stopped | None:
        """Why nothing of a tenant may go on, if so."""
        if tenant in self.paused:
            return Stopped("This tenant is paused by an administrator.", "tenant_paused")
        return None

    def against(self, request: RequestInfo) -> Stopped | None:
        """Why a request may not go on, if so."""
        if stopped := self.against_all_of(request.tenant):
            return stopped
        if not self.stopped.isdisjoint((request.request_id, answer_id(request))):
            return Stopped("An administrator has stopped this request.", "request_stopped")
        return None


NO_ORDERS = Orders()


def answer_id(request: RequestInfo) -> str:
    """What the client calls the answer that a sequence belongs to."""
    return request.request_id.rpartition("-")[0]


@dataclass(slots=True)
class _Shown:
    """What an ingress has shown."""

    sequence: int = -1
    waiting: dict[str, RequestInfo] = field(default_factory=dict)
    leases: tuple[LeaseInfo, ...] = ()


class OrderBook:
    """Admission's list of orders, with what each ingress has shown last."""

    def __init__(self) -> None:
        self._paused: dict[str, bool] = {}
        """False of a tenant that was resumed."""
        self._stopped: dict[str, float] = {}
        """When that was, by id."""
        self._shown: dict[str, _Shown] = {}

    @property
    def orders(self) -> Orders:
        """The orders that are in force now."""
        oldest = time.monotonic() - TOLD_S
        self._stopped = {name: at for name, at in self._stopped.items() if at > oldest}
        paused = (name for name, is_paused in self._paused.items() if is_paused)
        return Orders(frozenset(paused), frozenset(self._stopped))

    def pause(self, tenant: str, on: bool) -> None:
        self._paused[tenant] = on

    def stop(self, name: str) -> int:
        """Stop an answer or a sequence, by its id. Returns how many sequences that are."""
        found = sum(name in (info.request_id, answer_id(info)) for info, *_ in self._open())
        if found:
            self._stopped[name] = time.monotonic()
        return found

    def learn(self, paused: Collection[str]) -> bool:
        """Tenants that an earlier Admission had paused, unless this one was told otherwise.
        Returns whether one is news."""
        news = [name for name in paused if name not in self._paused]
        self._paused |= dict.fromkeys(news, True)
        return bool(news)

    def show(self, sync: Sync) -> None:
        """What an ingress has now, or what has changed since it showed that last."""
        shown = self._shown.setdefault(sync.ingress, _Shown())
        if sync.sequence < shown.sequence:
            return
        shown.sequence, shown.leases = sync.sequence, sync.leases
        if sync.base is None:
            shown.waiting = {}
        for request_id in sync.gone:
            shown.waiting.pop(request_id, None)
        shown.waiting |= {info.request_id: info for info in sync.waiting}

    def forget(self, ingresses: Collection[str]) -> None:
        """All but these are gone."""
        self._shown = {name: self._shown[name] for name in self._shown if name in ingresses}

    def counts(self) -> dict[str, tuple[int, int]]:
        """By tenant, requests that wait and that run."""
        found: dict[str, list[int]] = {}
        for info, replica, _ in self._open():
            found.setdefault(info.tenant, [0, 0])[bool(replica)] += 1
        return {name: (waiting, running) for name, (waiting, running) in found.items()}

    def requests(self, tenant: str | None) -> list[dict[str, Any]]:
        """Sequences that wait or run, of one tenant or of all, `MAX_LISTED` at most."""
        return _told(each for each in self._open() if tenant in (None, each[0].tenant))

    def find(self, name: str) -> list[dict[str, Any]]:
        """Those of an answer, or one sequence."""
        return _told(
            each for each in self._open() if name in (each[0].request_id, answer_id(each[0]))
        )

    def _open(self) -> Iterator[tuple[RequestInfo, str, int]]:
        """With its replica, if it runs, and its output."""
        for shown in self._shown.values():
            yield from ((info, "", 0) for info in shown.waiting.values())
            yield from ((lease.request, lease.replica, lease.produced) for lease in shown.leases)


def _told(found: Iterable[tuple[RequestInfo, str, int]]) -> list[dict[str, Any]]:
    return [
        {
            "id": answer_id(info) or info.request_id,
            "sequence": info.request_id,
            "tenant": info.tenant,
            "model": info.model,
            "state": "running" if replica else "waiting",
            "replica": replica or None,
            "prompt_tokens": info.prompt_tokens,
            "output_tokens": produced,
        }
        for info, replica, produced in islice(found, MAX_LISTED)
    ]

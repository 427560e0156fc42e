"""Where a request can run: slots and KV room of each replica, as the replicas report them.

Knows neither tenants nor order. HangDetector of a replica withdraws its credits; the leases on it
stay until their ingress ends them. A few rows are kept for newcomers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from router.loads import LoadOrder
from router.messages import ReplicaReport
from router.policy import FairPolicy
from router.prefixes import PrefixCache, PrefixIndex
from router.request import Request


@dataclass(slots=True)
class Replica:
    """One replica's capacity, and the requests that hold some of it."""

    name: str
    bit: int
    """The set of replicas that holds this one alone, see `loads.py`."""
    prefixes: PrefixCache
    slots: int = 0
    """0 as well when it never reported or fell silent."""
    common_slots: int = 0
    """Free slots that are not kept for newcomers."""
    kv_tokens: int = 0
    reported_at: float = 0.0
    leases: dict[Request, int] = field(default_factory=dict)
    """KV tokens held by each request, in the order of the grants."""
    kv_held: int = 0

    @property
    def kv_free(self) -> int:
        return self.kv_tokens - self.kv_held


class Credits:
    """Slots and KV room of all replicas."""

    def __init__(
        self,
        policy: FairPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        report_timeout_s: float = 2.0,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._report_timeout_s = report_timeout_s
        self._replicas: dict[str, Replica] = {}
        self._by_bit: dict[int, Replica] = {}
        self._loads, self._prefixes = LoadOrder(), PrefixIndex()
        self._free = self._common_free = 0
        """Who has a slot for newcomers, and for everybody."""

    def replicas(self) -> Mapping[str, Replica]:
        return self._replicas

    def report(self, report: ReplicaReport) -> None:
        replica = self._replica(report.replica)
        replica.slots, replica.kv_tokens = report.slots, report.kv_tokens
        replica.common_slots = self._common(report)
        replica.reported_at = self._clock()
        self._update(replica)

    def expire(self) -> list[Replica]:
        """Withdraw the credits of silent replicas. Returns those that fell silent now."""
        oldest = self._clock() - self._report_timeout_s
        silent = [replica for replica in self._replicas.values() if replica.reported_at < oldest]
        fell_silent = [replica for replica in silent if replica.slots]
        for replica in silent:
            replica.slots = replica.common_slots = 0
            self._update(replica)
            if not replica.leases:
                self._forget(replica)
        return fell_silent

    def any_slot(self, excluding: str | None = None, *, newcomer: bool = True) -> bool:
        """Whether a replica other than `excluding` has a free slot, KV room aside."""
        return bool(self._with_slots(excluding, newcomer))

    def find(
        self,
        request: Request,
        excluding: str | None = None,
        *,
        newcomer: bool = True,
        beyond: int = -1,
    ) -> Replica | None:
        """The replica that has a free slot, room for a request (an empty one always has) and most
        of its prompt cached, more than `beyond` tokens; the least loaded (leases by slots) among
        equals. None if no replica takes it."""
        open_to, kv_need = self._with_slots(excluding, newcomer), request.kv_need
        if prefixes := request.info.prefixes:
            shortest = beyond if beyond > 0 else 0
            for matched, holders in self._prefixes.matches(prefixes, open_to, shortest):
                replica = self._least_loaded(holders & open_to, kv_need - matched)
                if replica is not None:
                    return replica
                open_to &= ~holders  # without room for so much, they have none for more
        return self._least_loaded(open_to, kv_need) if beyond < 0 else None

    def roomiest(self) -> str | None:
        """The replica in service with the most KV room, its slots aside."""
        in_service = [replica for replica in self._replicas.values() if replica.slots]
        return max(in_service, key=lambda replica: replica.kv_free).name if in_service else None

    def take(self, request: Request, name: str) -> None:
        """Hold a slot and KV room, but for what is cached there. It may exceed what there is:
        running work is a fact."""
        replica = self._replicas.get(name) or self._replica(name)
        prefixes = request.info.prefixes
        kv_need = request.kv_need - (replica.prefixes.match(prefixes) if prefixes else 0)
        replica.leases[request] = kv_need
        replica.kv_held += kv_need
        request.replica = name
        if prefixes:
            replica.prefixes.add(prefixes, replica.kv_free)
        self._update(replica)

    def release(self, request: Request) -> None:
        """Give back what the request holds, if it holds anything."""
        replica = self._replicas.get(request.replica)
        if replica is not None:
            replica.kv_held -= replica.leases.pop(request, 0)
            self._update(replica)
        request.replica = ""

    def _common(self, report: ReplicaReport) -> int:
        """Lookahead slots lie behind all rows: they would fill the ones that are kept."""
        rows = report.slots - report.lookahead
        reserved = self._policy.reserved(rows)
        return rows - reserved if reserved else report.slots

    def _with_slots(self, excluding: str | None, newcomer: bool) -> int:
        """The set of replicas with a free slot, KV room aside."""
        found = self._free if newcomer else self._common_free
        replica = None if excluding is None else self._replicas.get(excluding)
        return found if replica is None else found & ~replica.bit

    def _least_loaded(self, replicas: int, kv_need: int) -> Replica | None:
        """The least loaded replica of a set that has room for `kv_need` tokens."""
        for bit in self._loads.sort(replicas):
            replica = self._by_bit[bit]
            if not replica.leases or kv_need <= replica.kv_tokens - replica.kv_held:
                return replica
        return None

    def _update(self, replica: Replica) -> None:
        """Its slots or its leases have changed."""
        bit, leases = replica.bit, len(replica.leases)
        slots, common = replica.slots, replica.common_slots
        self._free = self._free | bit if leases < slots else self._free & ~bit
        self._common_free = self._common_free | bit if leases < common else self._common_free & ~bit
        self._loads.move(bit, leases / slots if slots else inf)

    def _replica(self, name: str) -> Replica:
        replica = self._replicas.get(name)
        if replica is None:
            bit = self._loads.add()
            cache = PrefixCache(self._prefixes, bit)
            replica = Replica(name, bit, cache, reported_at=self._clock())
            self._replicas[name] = self._by_bit[bit] = replica
        return replica

    def _forget(self, replica: Replica) -> None:
        del self._replicas[replica.name], self._by_bit[replica.bit]
        replica.prefixes.shrink(0)
        self._loads.remove(replica.bit)

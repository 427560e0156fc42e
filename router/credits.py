"""Where a request can run: slots and KV room of each replica, as the replicas report them.

Knows neither tenants nor order. Silence of a replica withdraws its credits; the leases on it
stay until their ingress ends them. A few rows are kept for newcomers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.messages import ReplicaReport
from router.policy import FairPolicy
from router.prefixes import PrefixIndex
from router.request import Request


@dataclass(slots=True)
class Replica:
    """What one replica offers, and who holds it."""

    name: str
    slots: int = 0
    """0 as well when it never reported or fell silent."""
    common_slots: int = 0
    """Those that are not kept for newcomers."""
    kv_tokens: int = 0
    reported_at: float = 0.0
    leases: dict[Request, int] = field(default_factory=dict)
    """KV tokens held by each request, in the order of the grants."""
    kv_held: int = 0
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)

    @property
    def kv_free(self) -> int:
        return self.kv_tokens - self.kv_held


class Credits:
    """Slots and KV room of all replicas. Choosing costs O(replicas)."""

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

    def replicas(self) -> Mapping[str, Replica]:
        return self._replicas

    def report(self, report: ReplicaReport) -> None:
        replica = self._replica(report.replica)
        replica.slots, replica.kv_tokens = report.slots, report.kv_tokens
        replica.common_slots = self._common(report)
        replica.reported_at = self._clock()

    def expire(self) -> list[Replica]:
        """Withdraw the credits of silent replicas. Returns those that fell silent now."""
        oldest = self._clock() - self._report_timeout_s
        silent = [replica for replica in self._replicas.values() if replica.reported_at < oldest]
        fell_silent = [replica for replica in silent if replica.slots]
        for replica in silent:
            replica.slots = replica.common_slots = 0
            if not replica.leases:
                del self._replicas[replica.name]
        return fell_silent

    def any_slot(self, excluding: str | None = None, *, newcomer: bool = True) -> bool:
        """Whether a replica other than `excluding` has a free slot, KV room aside."""
        for replica in self._replicas.values():
            slots = replica.slots if newcomer else replica.common_slots
            if len(replica.leases) < slots and replica.name != excluding:
                return True
        return False

    def find(
        self, request: Request, excluding: str | None = None, *, newcomer: bool = True
    ) -> Replica | None:
        """The replica that has a free slot, room for a request (an empty one always has) and most
        of its prompt cached; the least loaded (leases by slots) among equals. None if no replica
        takes it."""
        best, best_rank = None, (0, 0.0)
        kv_need, prefixes = request.kv_need, request.info.prefixes
        for replica in self._replicas.values():
            leases = len(replica.leases)
            slots = replica.slots if newcomer else replica.common_slots
            if leases >= slots or replica.name == excluding:
                continue
            matched = replica.prefixes.match(prefixes) if prefixes else 0
            if not leases or kv_need - matched <= replica.kv_tokens - replica.kv_held:
                rank = (-matched, leases / replica.slots)
                if best is None or rank < best_rank:
                    best, best_rank = replica, rank
        return best

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

    def release(self, request: Request) -> None:
        """Give back what the request holds, if it holds anything."""
        replica = self._replicas.get(request.replica)
        if replica is not None:
            replica.kv_held -= replica.leases.pop(request, 0)
        request.replica = ""

    def _common(self, report: ReplicaReport) -> int:
        """Lookahead slots lie behind all rows: they would fill the ones that are kept."""
        rows = report.slots - report.lookahead
        reserved = self._policy.reserved(rows)
        return rows - reserved if reserved else report.slots

    def _replica(self, name: str) -> Replica:
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = Replica(name, reported_at=self._clock())
        return replica

"""Where a request can run: slots and KV room of each replica, as the replicas report them.

Knows neither tenants nor order. Silence of a replica withdraws its credits; the leases on it
stay until their ingress ends them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.messages import ReplicaReport
from router.request import Request


@dataclass(slots=True)
class Replica:
    """What one replica offers, and who holds it."""

    name: str
    slots: int = 0
    """0 as well when it never reported or fell silent."""
    kv_tokens: int = 0
    reported_at: float = 0.0
    leases: dict[Request, int] = field(default_factory=dict)
    """KV tokens held by each request, in the order of the grants."""
    kv_held: int = 0

    @property
    def kv_free(self) -> int:
        return self.kv_tokens - self.kv_held

    def takes(self, kv_need: int) -> bool:
        """Whether a slot is free and the request fits; alone it always does."""
        leases = len(self.leases)
        return leases < self.slots and (not leases or kv_need <= self.kv_free)


class Credits:
    """Slots and KV room of all replicas. Choosing costs O(replicas)."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, report_timeout_s: float = 2.0
    ) -> None:
        self._clock = clock
        self._report_timeout_s = report_timeout_s
        self._replicas: dict[str, Replica] = {}

    def replicas(self) -> Mapping[str, Replica]:
        return self._replicas

    def report(self, report: ReplicaReport) -> None:
        replica = self._replica(report.replica)
        replica.slots, replica.kv_tokens = report.slots, report.kv_tokens
        replica.reported_at = self._clock()

    def expire(self) -> list[Replica]:
        """Withdraw the credits of silent replicas. Returns those that fell silent now."""
        oldest = self._clock() - self._report_timeout_s
        silent = [replica for replica in self._replicas.values() if replica.reported_at < oldest]
        fell_silent = [replica for replica in silent if replica.slots]
        for replica in silent:
            replica.slots = 0
            if not replica.leases:
                del self._replicas[replica.name]
        return fell_silent

    def any_slot(self, excluding: str | None = None) -> bool:
        """Whether a replica other than `excluding` has a free slot, KV room aside."""
        return any(
            len(replica.leases) < replica.slots and replica.name != excluding
            for replica in self._replicas.values()
        )

    def find(self, kv_need: int, excluding: str | None = None) -> str | None:
        """The least loaded replica (leases by slots) that takes a request, if any."""
        best, least = None, 0.0
        for replica in self._replicas.values():
            if replica.takes(kv_need) and replica.name != excluding:
                load = len(replica.leases) / replica.slots
                if best is None or load < least:
                    best, least = replica.name, load
        return best

    def roomiest(self) -> str | None:
        """The replica in service with the most KV room, its slots aside."""
        in_service = [replica for replica in self._replicas.values() if replica.slots]
        return max(in_service, key=lambda replica: replica.kv_free).name if in_service else None

    def take(self, request: Request, name: str) -> None:
        """Hold a slot and KV room. It may exceed what there is: running work is a fact."""
        replica = self._replica(name)
        replica.leases[request] = request.kv_need
        replica.kv_held += request.kv_need
        request.replica = name

    def release(self, request: Request) -> None:
        """Give back what the request holds, if it holds anything."""
        replica = self._replicas.get(request.replica)
        if replica is not None:
            replica.kv_held -= replica.leases.pop(request, 0)
        request.replica = ""

    def _replica(self, name: str) -> Replica:
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = Replica(name, reported_at=self._clock())
        return replica

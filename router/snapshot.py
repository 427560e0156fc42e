"""The state of a router at one moment, for metrics and autoscaling. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.dispatcher import Dispatcher
from router.ledger import Usage


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    queued: int
    running: int
    virtual_time: float
    """Its counter: service had, as a cost divided by its weight."""
    held_micro_dollars: int = 0
    spent_micro_dollars: dict[str, int] = field(default_factory=dict)
    """By window of its budgets, those that are over left out once nothing is held in them."""


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    slots: int
    """0 when it is draining or silent."""
    leases: int
    kv_tokens: int
    kv_held: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    epoch: int
    virtual_time: float
    tenants: dict[str, TenantSnapshot]
    replicas: dict[str, ReplicaSnapshot]
    ingresses: dict[str, int]
    """Requests known of each ingress."""
    usage: dict[str, Usage]
    """Totals of every tenant that had a request since the start, tenants now gone included."""

    @property
    def queued(self) -> int:
        """Requests that wait for a credit."""
        return sum(tenant.queued for tenant in self.tenants.values())


def take_snapshot(epoch: int, dispatcher: Dispatcher, ingresses: Mapping[str, int]) -> Snapshot:
    """Counts of everything; O(tenants)."""
    queue = dispatcher.queue
    return Snapshot(
        epoch=epoch,
        virtual_time=queue.virtual_time,
        tenants={name: _of_tenant(dispatcher, name) for name in queue.tenants()},
        replicas={
            name: ReplicaSnapshot(
                slots=replica.slots,
                leases=len(replica.leases),
                kv_tokens=replica.kv_tokens,
                kv_held=replica.kv_held,
            )
            for name, replica in dispatcher.credits.replicas().items()
        },
        ingresses=dict(ingresses),
        usage=dispatcher.ledger.usage(),
    )


def _of_tenant(dispatcher: Dispatcher, name: str) -> TenantSnapshot:
    tenant, quota = dispatcher.queue.tenants()[name], dispatcher.quotas.get(name)
    return TenantSnapshot(
        queued=tenant.queued,
        running=len(tenant.running),
        virtual_time=tenant.counter.value,
        held_micro_dollars=quota.held() if quota is not None else 0,
        spent_micro_dollars=quota.spent() if quota is not None else {},
    )

"""The state of a router at one moment, for metrics and autoscaling. Values only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from router.ledger import Usage
from router.messages import HeldBack
from router.pools import Pools


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    queued: int
    """In all pools together, as ..."""
    running: int
    """... this is."""
    virtual_times: dict[str, float]
    """Its counter in each model's pool: service had, as a cost divided by its weight."""
    weight: float = 1.0
    service: dict[str, float] = field(default_factory=dict)
    """Had of each model since the start, as a cost."""
    held_micro_dollars: int = 0
    spent_micro_dollars: dict[str, int] = field(default_factory=dict)
    """By window of its budgets, those that are over left out once nothing is held in them."""
    held_back: dict[str, HeldBack] = field(default_factory=dict)
    """By model, why its next request waits, if one does."""
    rates_left: dict[str, int] = field(default_factory=dict)
    """Of its "requests" and "tokens" in a minute, as far as these are limited."""
    unspent_micro_dollars: dict[str, int] = field(default_factory=dict)
    """Of its budgets, by "day" and "month"."""


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    model: str
    slots: int
    """0 when it is draining or silent."""
    leases: int
    kv_tokens: int
    kv_held: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    epoch: int
    virtual_times: dict[str, float]
    """By model."""
    tenants: dict[str, TenantSnapshot]
    replicas: dict[str, ReplicaSnapshot]
    ingresses: dict[str, int]
    """Requests known of each ingress."""
    usage: dict[str, Usage]
    """Totals of every tenant that had a request since the start, tenants now gone included."""
    waiting: dict[str, int]
    """Requests that wait for a credit, by model."""

    @property
    def queued(self) -> int:
        """Requests that wait for a credit."""
        return sum(self.waiting.values())


def take_snapshot(
    epoch: int, pools: Pools, ingresses: Mapping[str, int], tenants: Collection[str] | None = None
) -> Snapshot:
    """Counts of everything, or of these tenants alone; O(tenants)."""
    queues = {model: pool.queue for model, pool in pools.items()}
    names = tenants
    if names is None:
        names = dict.fromkeys(name for queue in queues.values() for name in queue.tenants())
    held_back = pools.held_back(set(names))
    return Snapshot(
        epoch=epoch,
        virtual_times={model: queue.virtual_time for model, queue in queues.items()},
        tenants={name: _of_tenant(pools, name, held_back) for name in names},
        replicas={
            replica.name: ReplicaSnapshot(
                model=model,
                slots=replica.slots,
                leases=len(replica.leases),
                kv_tokens=replica.kv_tokens,
                kv_held=replica.kv_held,
            )
            for model, pool in pools.items()
            for replica in pool.credits.replicas().values()
        },
        ingresses=dict(ingresses),
        usage=pools.accounts.ledger.usage(tenants),
        waiting={model: queue.waiting for model, queue in queues.items()},
    )


def _of_tenant(
    pools: Pools, name: str, held_back: Mapping[str, Mapping[str, HeldBack]]
) -> TenantSnapshot:
    queues = {model: pool.queue.tenants().get(name) for model, pool in pools.items()}
    known = {model: queue for model, queue in queues.items() if queue is not None}
    quota = pools.accounts.quotas.get(name)
    return TenantSnapshot(
        queued=sum(queue.queued for queue in known.values()),
        running=sum(len(queue.running) for queue in known.values()),
        virtual_times={model: queue.counter.value for model, queue in known.items()},
        weight=next((queue.counter.weight for queue in known.values()), 1.0),
        service={model: pool.queue.served.get(name, 0.0) for model, pool in pools.items()},
        held_micro_dollars=quota.reserved() if quota is not None else 0,
        spent_micro_dollars=quota.spent() if quota is not None else {},
        held_back={model: of[name] for model, of in held_back.items() if name in of},
        rates_left=quota.rate_limits().left() if quota is not None else {},
        unspent_micro_dollars=quota.unspent() if quota is not None else {},
    )

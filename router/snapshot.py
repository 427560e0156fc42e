"""The state of a router at one moment, for metrics and autoscaling. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from router.ledger import Usage


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    queued: int
    running: int
    virtual_time: float
    """Its counter: service had, as a cost divided by its weight."""


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

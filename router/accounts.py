"""What the pools of all models share: the ledger, and what each tenant is limited in.

Knows neither order nor replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from router.concurrency import Concurrency
from router.ledger import Ledger
from router.pricing import PriceList
from router.quota import Quota
from router.tenant import Tenant

Spent: TypeAlias = Mapping[tuple[str, str], int]
"""Micro-dollars by tenant and window."""


class Accounts:
    """The accounts of every tenant seen since the start: one that comes back finds its counters."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        prices: PriceList | None = None,
    ) -> None:
        self.ledger = Ledger()
        self.prices = prices or PriceList({})
        self.quotas: dict[str, Quota] = {}
        self.concurrencies: dict[str, Concurrency] = {}
        """Both hold the tenants that some pool knows."""
        self._clock, self._wall = clock, wall

    def configure(self, tenants: Iterable[Tenant]) -> None:
        """Take over quotas; what is used of them stays. The queues tell the concurrency."""
        for tenant in tenants:
            quota = self.quotas.get(tenant.id)
            if quota is not None:
                quota.configure(tenant)
            else:
                self.quotas[tenant.id] = Quota(tenant, self.prices, self._clock, self._wall)

    def windows(self, tenants: Iterable[str]) -> list[tuple[str, str]]:
        """Tenant and window of all money of theirs that is counted now."""
        return [(name, window) for name in tenants for window in self.quotas[name].windows()]

    def learn_spending(self, spent: Spent) -> None:
        """Take over what was spent as it is written down, and add what is not written yet."""
        unwritten = self.ledger.unwritten()
        for (name, window), amount in spent.items():
            self.quotas[name].learn(window, amount + unwritten[name, window])

    def queued(self, tenant: str) -> int:
        """Requests of a tenant that wait, for whichever model."""
        concurrency = self.concurrencies.get(tenant)
        return concurrency.queued if concurrency is not None else 0

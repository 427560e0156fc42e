"""A pool of replicas for each model: its own queue and credits, and accounts in common.

The module knows neither ingresses nor what they say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, ItemsView, Iterator, Set

from router.accounts import Accounts
from router.dispatcher import Dispatcher
from router.messages import HeldBack
from router.policy import FairPolicy
from router.request import Request
from router.tenant import Tenant


class Pools:
    """Pools by name of the model. One comes to be when it is first heard of."""

    def __init__(
        self,
        policy: FairPolicy,
        clock: Callable[[], float],
        report_timeout_s: float,
        accounts: Accounts,
    ) -> None:
        self.accounts = accounts
        self._policy, self._clock, self._report_timeout_s = policy, clock, report_timeout_s
        self._tenants: dict[str, Tenant] = {}
        self._pools: OrderedDict[str, Dispatcher] = OrderedDict()
        """The one that granted last is the last: what a tenant may run at once goes round."""

    def of(self, model: str) -> Dispatcher:
        """The pool of a model."""
        pool = self._pools.get(model)
        if pool is None:
            pool = Dispatcher(self._policy, self._clock, self._report_timeout_s, self.accounts)
            pool.configure(self._tenants.values())
            self._pools[model] = pool
        return pool

    def __iter__(self) -> Iterator[Dispatcher]:
        return iter(self._pools.values())

    def items(self) -> ItemsView[str, Dispatcher]:
        return self._pools.items()

    @property
    def waiting(self) -> int:
        """Requests of all tenants that wait."""
        return sum(pool.queue.waiting for pool in self)

    def configure(self, tenants: Collection[Tenant]) -> None:
        """Take over weights and limits of tenants that are new or have changed; counters stay."""
        self._tenants |= {tenant.id: tenant for tenant in tenants}
        self.accounts.configure(tenants)
        for pool in self:
            pool.configure(tenants)

    def retire(self, names: Collection[str]) -> None:
        """These tenants are gone. What is used of their quotas stays known."""
        for name in names:
            self._tenants.pop(name, None)
        for pool in self:  # Those that went before had maybe something to end.
            pool.retire(pool.queue.tenants().keys() - self._tenants.keys())

    def dispatch(self) -> list[Request]:
        """Grant until no free credit of any pool suits a waiting request of its own."""
        granted: list[Request] = []
        for model, pool in list(self._pools.items()):
            if requests := pool.dispatch():
                granted += requests
                self._pools.move_to_end(model)
        return granted

    def overdue(self) -> list[Request]:
        """Requests that wait, have not begun, and have passed their deadlines."""
        return [request for pool in self for request in pool.overdue()]

    def expire(self) -> None:
        """Withdraw the credits of silent replicas."""
        for pool in self:
            pool.expire()

    def held_back(self, tenants: Set[str]) -> dict[str, dict[str, HeldBack]]:
        """By model, why the next request of each of the tenants waits, where one does."""
        waited_for = [(model, pool) for model, pool in self.items() if pool.queue.waiting]
        return {model: pool.held_back(tenants) for model, pool in waited_for}

    def virtual_times(self, tenants: Set[str]) -> dict[str, dict[str, float]]:
        """By model, of those of the tenants that its pool knows."""
        times = {}
        for model, pool in self.items():
            queues = pool.queue.tenants()
            times[model] = {name: queues[name].counter.value for name in tenants & queues.keys()}
        return times

"""Who gets in: room in the queue first, then the tenant's quotas; and what a refusal says.

Nothing is counted for a request that is refused. Knows neither ingresses
nor when to dispatch.
"""

from __future__ import annotations

from math import ceil

from router.messages import Refusal, RefusalKind, RequestInfo
from router.policy import FairPolicy
from router.pools import Pools
from router.quota import FULL_S
from router.request import Request

MIN_RETRY_S, MAX_RETRY_S = 1, 60
"""Bounds of what is only guessed."""


class Gate:
    """Admits or refuses new requests. Expects a configured tenant."""

    def __init__(self, pools: Pools, policy: FairPolicy) -> None:
        self._pools = pools
        self._max_waiting = policy.max_waiting

    def has_room(self, tenant: str, count: int = 1) -> bool:
        """Whether so many more requests of the tenant may wait."""
        accounts = self._pools.accounts
        return accounts.queued(tenant) + count <= accounts.quotas[tenant].tenant.max_queued

    def admit(self, *requests: Request, again: bool = False) -> Refusal | None:
        """Let what a client asked for at once wait, all of it, where it has room; or refuse it.

        again: an earlier router has admitted it, and only money refuses it.
        """
        info = requests[0].info
        if self._pools.waiting >= self._max_waiting and not again:
            retry_s = self._guess_s(info, 1)
            reason = "too many requests wait"
            return self._refusal(info, RefusalKind.OVERLOAD, reason, retry_s, FULL_S)
        denial = self._pools.of(info.model).admit(*requests, again=again)
        if denial is None:
            return None
        return self._refusal(info, *denial)

    def full(self, info: RequestInfo, places: int) -> Refusal:
        """Come back when the tenant's queue has moved by `places`, at its recent pace."""
        limit = self._pools.accounts.quotas[info.tenant].tenant.max_queued
        reason = f"at most {limit} requests may wait"
        closed_s = FULL_S if self._is_closed(info.tenant) else 0.0
        retry_s = self._guess_s(info, places)
        return self._refusal(info, RefusalKind.RATE, reason, retry_s, closed_s)

    def _is_closed(self, tenant: str) -> bool:
        """Whether nothing more may wait, and nothing would start at once, for whichever model."""
        concurrency = self._pools.accounts.concurrencies[tenant]
        starts = concurrency.free and not all(queue.queued for queue in concurrency.queues)
        return not starts and not self.has_room(tenant)

    def overdue(self, info: RequestInfo) -> Refusal:
        """The refusal of a request that waited for too long."""
        retry_s = self._guess_s(info, 1)
        return self._refusal(info, RefusalKind.DEADLINE, "it waited for too long", retry_s)

    @staticmethod
    def _refusal(
        info: RequestInfo,
        kind: RefusalKind,
        reason: str,
        retry_after_s: float,
        closed_s: float = 0.0,
    ) -> Refusal:
        sentence = f"Request refused for tenant {info.tenant}: {reason}."
        retry_s = max(retry_after_s, MIN_RETRY_S)
        return Refusal(info.request_id, sentence, retry_s, kind, closed_s)

    def _guess_s(self, info: RequestInfo, places: int) -> float:
        interval_s = self._pools.of(info.model).place_interval(info.tenant)
        retry_s = ceil(places * interval_s)
        return min(max(retry_s, MIN_RETRY_S), MAX_RETRY_S)

"""Who gets in: room in the queue first, then the tenant's quotas; and what a refusal says.

Nothing is counted for a request that is refused. Knows neither ingresses
nor when to dispatch.
"""

from __future__ import annotations

from math import ceil

from router.messages import Refusal, RefusalKind, RequestInfo
from router.policy import FairPolicy
from router.pools import Pools
from router.request import Request

MIN_RETRY_S, MAX_RETRY_S = 1, 60
"""Bounds of what is only guessed."""


class Gate:
    """Decides about newcomers; asks for tenants that are configured only."""

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
            return self._refusal(info, RefusalKind.OVERLOAD, "too many requests wait", retry_s)
        denial = self._pools.of(info.model).admit(*requests, again=again)
        if denial is None:
            return None
        return self._refusal(info, denial.kind, denial.reason, denial.retry_after_s)

    def full(self, info: RequestInfo, places: int) -> Refusal:
        """Come back when the tenant's queue has moved by `places`, at its recent pace."""
        limit = self._pools.accounts.quotas[info.tenant].tenant.max_queued
        reason = f"at most {limit} requests may wait"
        return self._refusal(info, RefusalKind.RATE, reason, self._guess_s(info, places))

    def overdue(self, info: RequestInfo) -> Refusal:
        """It waited for too long."""
        retry_s = self._guess_s(info, 1)
        return self._refusal(info, RefusalKind.DEADLINE, "it waited for too long", retry_s)

    @staticmethod
    def _refusal(
        info: RequestInfo, kind: RefusalKind, reason: str, retry_after_s: float
    ) -> Refusal:
        sentence = f"Request refused for tenant {info.tenant}: {reason}."
        return Refusal(info.request_id, sentence, max(retry_after_s, MIN_RETRY_S), kind)

    def _guess_s(self, info: RequestInfo, places: int) -> float:
        interval_s = self._pools.of(info.model).place_interval(info.tenant)
        retry_s = ceil(places * interval_s)
        return min(max(retry_s, MIN_RETRY_S), MAX_RETRY_S)

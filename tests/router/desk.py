"""A router with one ingress at its desk, for tests of single conversations."""

from __future__ import annotations

from router.messages import (
    Ending,
    GpuTime,
    LeaseInfo,
    Outcome,
    RateLimits,
    ReplicaReport,
    RequestInfo,
    Sync,
    SyncReply,
)
from router.policy import FairPolicy
from router.pricing import PriceList, Prices
from router.router import Router
from router.snapshot import Snapshot
from tests.router.world import Clock, tenants_of

EPOCH = 7
PRICES = PriceList({"m": Prices(prompt=1.0, cached=0.5, output=2.0)})
"""Micro-dollars per token."""


class Desk:
    """A router, and one ingress that says exactly what a test tells it to."""

    def __init__(
        self,
        slots: int = 0,
        grace_s: float = 0.0,
        policy: FairPolicy | None = None,
        **tenants: dict[str, object],
    ) -> None:
        self.clock = Clock()
        self.router = Router(
            tenants_of(**(tenants or {"a": {}})),
            epoch=EPOCH,
            policy=policy or FairPolicy(burst=0.0),
            prices=PRICES,
            clock=self.clock,
            wall=self.clock,
            grace_s=grace_s,
        )
        self.sequence = 0
        if slots:
            self.report(slots)

    def report(
        self, slots: int, replica: str = "r", gpu: GpuTime | None = None, model: str = "m"
    ) -> None:
        self.router.report(ReplicaReport(replica, slots, kv_tokens=100_000, gpu=gpu, model=model))

    def sync(
        self,
        *waiting: RequestInfo,
        admitted: int = 0,
        leases: tuple[LeaseInfo, ...] = (),
        endings: tuple[Ending, ...] = (),
        ingress: str = "i",
        epoch: int = EPOCH,
        virtual_times: dict[str, dict[str, float]] | None = None,
        rates: dict[str, RateLimits] | None = None,
        rates_epoch: int | None = None,
    ) -> SyncReply:
        self.sequence += 1
        return self.router.sync(
            Sync(
                ingress=ingress,
                sequence=self.sequence,
                epoch=epoch,
                waiting=waiting,
                admitted=admitted,
                leases=leases,
                endings=endings,
                virtual_times=virtual_times or {},
                rates=rates or {},
                rates_epoch=epoch if rates_epoch is None else rates_epoch,
            )
        )

    def snapshot(self) -> Snapshot:
        return self.router.snapshot()

    def running(self, tenant: str = "a") -> int:
        return self.snapshot().tenants[tenant].running

    def queued(self, tenant: str = "a") -> int:
        return self.snapshot().tenants[tenant].queued

    def outcomes(self, tenant: str = "a") -> dict[Outcome, int]:
        usage = self.snapshot().usage
        return {k: n for k, n in usage[tenant].outcomes.items() if n} if tenant in usage else {}


def info(
    request_id: str = "x", tenant: str = "a", attempt: int = 0, **fields: object
) -> RequestInfo:
    size = {"prompt_tokens": 100, "max_tokens": 50, "model": "m"}
    return RequestInfo(request_id, tenant, attempt=attempt, **(size | fields))


def infos(count: int, tenant: str = "a") -> list[RequestInfo]:
    return [info(f"{tenant}{i}", tenant) for i in range(count)]


def ending(of: RequestInfo, outcome: Outcome = Outcome.SUCCEEDED, produced: int = 5) -> Ending:
    return Ending(of, outcome, produced, cached=0)


def ids(reply: SyncReply) -> list[str]:
    return [grant.request_id for grant in reply.grants]


def refused(reply: SyncReply) -> list[str]:
    return [refusal.request_id for refusal in reply.refusals]

"""What a long queue costs Admission and its ingresses, with every sync, shown whole or as changes.

Eight ingresses have so many requests waiting together and all slots are taken. In each round some
requests end and as many come, and every ingress syncs once, as often as an idle one does. Seconds
are those of the processor: messages are encoded and decoded as on their way, the way is left out.
`admission_core` and `ingress_core` are shares of a core, of the one Admission and of each ingress;
`whole_ms` is what one sync that shows everything takes of Admission's loop at once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Any, cast

import msgspec

from benchmarks.report import Report, parser
from router.messages import Ending, LeaseInfo, Outcome, ReplicaReport, RequestInfo, Sync, SyncReply
from router.policy import FairPolicy
from router.router import Router
from router.tenant import Tenant, Tenants
from serve_app.fleet.admission_client import FULL_S, SYNC_PERIOD_S
from serve_app.fleet.request_state import Waiting
from serve_app.fleet.waiting_set import WaitingSet

INGRESSES, TENANTS, REPLICAS, SLOTS = 8, 200, 8, 256
ENDING = 6
"""Requests of an ingress that end in a round: about what eight GPUs answer."""
ROUNDS = 12
WAITING = (1_000, 10_000, 100_000)


@dataclass
class Ingress:
    name: str
    numbers: Iterator[int]
    shown: WaitingSet = field(default_factory=WaitingSet)
    leases: dict[str, LeaseInfo] = field(default_factory=dict)
    endings: dict[str, Ending] = field(default_factory=dict)
    sequence: int = 0
    epoch: int = 0

    def come(self, requests: int) -> None:
        for number in (next(self.numbers) for _ in range(requests)):
            name, tenant = f"chatcmpl-{number:032x}-0", f"t{number % TENANTS}"
            prefixes = tuple(range(number * 100, number * 100 + 5))
            info = RequestInfo(name, tenant, 2000, 500, model="m", prefixes=prefixes)
            self.shown.add(Waiting(info, cast(Any, None), 0.0, None))

    def end(self, requests: int) -> None:
        for name in list(self.leases)[:requests]:
            lease = self.leases.pop(name)
            self.endings[name] = Ending(lease.request, Outcome.SUCCEEDED, 250, 0)

    def show(self) -> Sync:
        self.sequence += 1
        return Sync(
            self.name,
            self.sequence,
            self.epoch,
            **self.shown.show(self.sequence)._asdict(),
            leases=tuple(self.leases.values()),
            endings=tuple(self.endings.values()),
        )

    def hear(self, reply: SyncReply) -> None:
        assert not reply.lost
        assert not reply.refusals
        self.epoch = reply.epoch
        self.shown.heard(self.sequence)
        for name in reply.settled:
            self.endings.pop(name, None)
        for grant in reply.grants:
            if (waiting := self.shown.leave(grant.request_id)) is not None:
                self.leases[grant.request_id] = LeaseInfo(waiting.request, grant.replica, 10, 0)


class Bench:
    """CPU seconds of each side, sync by sync."""

    def __init__(self, waiting: int) -> None:
        options: dict[str, Any] = {"max_concurrency": SLOTS, "max_queued": waiting}
        tenants = [Tenant(id=f"t{number}", **options) for number in range(TENANTS)]
        self.router = Router(
            Tenants(tenants=tenants),
            epoch=1,
            policy=FairPolicy(max_waiting=2 * waiting),
            grace_s=0.0,
            ingress_timeout_s=600,
            report_timeout_s=600,
        )
        for number in range(REPLICAS):
            self.router.report(ReplicaReport(f"r{number}", SLOTS, 10**8, model="m"))
        numbers = count()
        self.ingresses = [Ingress(f"i{number}", numbers) for number in range(INGRESSES)]
        for ingress in self.ingresses:
            ingress.come(waiting // INGRESSES)
        for _ in range(3):  # until all slots are taken and all of it is known
            self._round(0, whole=False)

    def rounds(self, whole: bool) -> tuple[float, float]:
        """Mean seconds of a sync: of Admission, of its ingress."""
        times = [each for _ in range(ROUNDS) for each in self._round(ENDING, whole)]
        admission, of_ingress = zip(*times, strict=True)
        return fmean(admission), fmean(of_ingress)

    def _round(self, ending: int, whole: bool) -> list[tuple[float, float]]:
        times = []
        for ingress in self.ingresses:
            ingress.end(ending)
            ingress.come(ending)
            if whole:
                ingress.shown.show_all()
            times.append(self._exchange(ingress))
        return times

    def _exchange(self, ingress: Ingress) -> tuple[float, float]:
        data, shown_s = _timed(lambda: msgspec.msgpack.encode(ingress.show()))

        def answer() -> bytes:
            sync = msgspec.msgpack.decode(data, type=Sync)
            return msgspec.msgpack.encode(self.router.sync(sync))

        said, answered_s = _timed(answer)
        _, heard_s = _timed(lambda: ingress.hear(msgspec.msgpack.decode(said, type=SyncReply)))
        return answered_s, shown_s + heard_s


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return work(), time.process_time() - began


def measure(report: Report, waiting: int, runs: int) -> None:
    bench = Bench(waiting)
    per_s = 1 / SYNC_PERIOD_S
    shares: dict[str, list[float]] = {}
    for _ in range(runs):
        whole, changes = bench.rounds(whole=True), bench.rounds(whole=False)
        # One of so many is whole.
        mixed = [old / (FULL_S * per_s) + new for old, new in zip(whole, changes, strict=True)]
        for way, (admission_s, ingress_s) in (("whole", whole), ("changes", mixed)):
            core = admission_s * per_s * INGRESSES
            shares.setdefault(f"admission_core.{way}", []).append(core)
            shares.setdefault(f"ingress_core.{way}", []).append(ingress_s * per_s)
        shares.setdefault("whole_ms", []).append(whole[0] * 1e3)
    for key, values in shares.items():
        report.add(f"{key}.{waiting}", values)


def main() -> None:
    chosen = parser("syncs", __doc__).parse_args()
    report = Report("syncs")
    gc.set_threshold(100_000, 50, 100)  # as the Admission deployment has it
    for waiting in WAITING:
        measure(report, waiting, chosen.runs)
    report.write(chosen.json)


if __name__ == "__main__":
    main()

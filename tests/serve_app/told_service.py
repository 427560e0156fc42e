"""What the processes of a server tell of themselves, made up."""

from __future__ import annotations

from itertools import count

from replica.messages import Stats
from router.latencies import Latency
from router.ledger import Usage
from router.messages import GpuTime, Outcome
from router.snapshot import ReplicaSnapshot, Snapshot, TenantSnapshot
from router.tenant import Tenant
from serve_app.checks.metrics_reference import READY
from serve_app.telemetry.exposition import Source, exposition
from serve_app.telemetry.metrics import AdmissionMetrics, IngressMetrics, ReplicaMetrics
from serve_app.telemetry.records import RequestRecord


class Service:
    """Metrics of a server whose engine works half of the time, in steps of two seconds."""

    def __init__(self, tenant: str = "acme", tenants: int = 1) -> None:
        self._names = [tenant, *(f"t{number}" for number in range(1, tenants))]
        self._admission, self._ingress = AdmissionMetrics(), IngressMetrics()
        self._replica, self._turns = ReplicaMetrics(READY), count(1)

    def text(self) -> str:
        return exposition(self.sources()).decode()

    def sources(self) -> list[Source]:
        """One turn later each time."""
        self._tell(next(self._turns))
        of_engine = {"replica": "r1", "model": "tiny"}
        return [
            Source("", {}, self._admission.instruments.gather()),
            Source("i", {"ingress": "i"}, self._ingress.instruments.gather()),
            Source("r1", of_engine, self._replica.instruments.gather()),
        ]

    def _tell(self, turn: int) -> None:
        usage = Usage(output_tokens=200 * turn, micro_dollars=10_000 * turn)
        usage.outcomes[Outcome.SUCCEEDED] = turn
        one = TenantSnapshot(
            queued=7,
            running=3,
            virtual_times={"tiny": 1205.0},
            weight=2.0,
            service={"tiny": 400.0 * turn},
            held_back={"tiny": "fair_share"},
            rates_left={"tokens": 4321},
            unspent_micro_dollars={"day": 2_500_000},
        )
        replica = ReplicaSnapshot(model="tiny", slots=16, leases=5, kv_tokens=64, kv_held=16)
        state = Snapshot(
            epoch=1,
            virtual_times={"tiny": 5.0},
            tenants=dict.fromkeys(self._names, one),
            replicas={"r1": replica},
            ingresses={},
            usage=dict.fromkeys(self._names, usage),
            waiting={"tiny": 7},
        )
        self._admission.tell(state)
        self._admission.observe([Latency("tiny", self._names[0], 2.0, 0.01)])
        self._ingress.tell({(self._names[0], "rate_limit_exceeded"): 6 * turn})
        tenant = Tenant(id=self._names[0], keys=[])
        record = RequestRecord({"state": {"tenant": tenant}}, model="tiny")
        with record.sequence(prompt_tokens=7) as sequence:
            for token in range(1, 4):
                sequence.tell(token, token * 0.04)
        self._ingress.observe(record)
        stats = Stats(running=3, waiting=2, steps=40 * turn, output_tokens=150 * turn)
        self._replica.tell(stats, GpuTime(requests=turn, bubble=0.25 * turn, spare=0.75 * turn))

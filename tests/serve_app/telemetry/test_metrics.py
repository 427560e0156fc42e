"""What is told to Ray; that Prometheus sees it is tested on a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from replica.messages import Stats
from router.latencies import Latency
from router.ledger import Usage
from router.messages import GpuTime, Outcome
from router.snapshot import ReplicaSnapshot, Snapshot, TenantSnapshot
from serve_app.checks.metrics_reference import READY
from serve_app.telemetry import instruments, metrics
from serve_app.telemetry.metrics import AdmissionMetrics, ReplicaMetrics

Told = dict[tuple[str, tuple[str, ...]], float]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What each metric stands at, by its name and labels."""
    values: Told = {}

    class Metric:
        def __init__(self, name: str, meaning: str, tag_keys: tuple[str, ...] = ()) -> None:
            self._name, self._labels = name, tag_keys

        def _key(self, tags: dict[str, str] | None) -> tuple[str, tuple[str, ...]]:
            assert set(tags or {}) == set(self._labels)
            return self._name, tuple((tags or {}).values())

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            values[self._key(tags)] = value

        def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
            assert value > 0, "Ray refuses this"
            key = self._key(tags)
            values[key] = values.get(key, 0) + value

    class Histogram(Metric):
        def __init__(self, name: str, meaning: str, boundaries: list[float], tag_keys: Any) -> None:
            super().__init__(name, meaning, tag_keys)
            self._bounds = boundaries

        def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
            name, labels = self._key(tags)
            bucket = next(bound for bound in self._bounds if value <= bound)
            for key in ((name, (*labels, str(bucket))), (f"{name}_sum", labels)):
                values[key] = values.get(key, 0) + (value if key[0] != name else 1)

    monkeypatch.setattr(instruments.metrics, "Histogram", Histogram)
    monkeypatch.setattr(instruments.metrics, "Gauge", Metric)
    monkeypatch.setattr(instruments.metrics, "Counter", Metric)
    monkeypatch.setattr(metrics, "PERIOD_S", 0.0)
    return values


def state(queued: int, running: int, usage: Usage) -> Snapshot:
    tenant = TenantSnapshot(queued=queued, running=running, virtual_times={})
    replicas = {
        "one": ReplicaSnapshot(model="m", slots=4, leases=1, kv_tokens=64, kv_held=16),
        "drains": ReplicaSnapshot(model="m", slots=0, leases=1, kv_tokens=64, kv_held=16),
    }
    idle = TenantSnapshot(queued=0, running=0, virtual_times={})
    return Snapshot(
        epoch=1,
        virtual_times={},
        tenants={"acme": tenant, "idle": idle},
        replicas=replicas,
        ingresses={},
        usage={"acme": usage},
        waiting={"m": queued, "cold": 0},
    )


def test_sums_are_told_as_they_grow(told: Told) -> None:
    usage = Usage(prompt_tokens=10, cached_tokens=4, output_tokens=7, micro_dollars=1500, slo_met=1)
    usage.outcomes[Outcome.SUCCEEDED] = 2
    shown = AdmissionMetrics()
    for _ in range(3):
        shown.tell(state(0, 0, usage))
    usage.output_tokens, usage.refused = 9, 1
    shown.tell(state(0, 0, usage))
    assert told["fairstream_tokens", ("acme", "prompt")] == 10
    assert told["fairstream_tokens", ("acme", "cached")] == 4
    assert told["fairstream_tokens", ("acme", "output")] == 9
    assert told["fairstream_requests", ("acme", "succeeded")] == 2
    assert told["fairstream_requests", ("acme", "refused")] == 1
    assert told["fairstream_slo_met", ("acme",)] == 1
    assert told["fairstream_dollars", ("acme",)] == pytest.approx(0.0015)


def test_a_queue_that_has_emptied_is_told_once_more_and_an_idle_tenant_never(told: Told) -> None:
    shown = AdmissionMetrics()
    shown.tell(state(3, 2, Usage()))
    assert told["fairstream_requests_waiting", ("acme",)] == 3
    assert told["fairstream_requests_running", ("acme",)] == 2
    shown.tell(state(0, 0, Usage()))
    assert told["fairstream_requests_waiting", ("acme",)] == 0
    told.clear()
    shown.tell(state(0, 0, Usage()))
    assert not [name for name, _ in told if name.startswith("fairstream_requests")]


def test_weight_and_service_are_told_of_who_had_some(told: Told) -> None:
    one = TenantSnapshot(
        queued=1, running=1, virtual_times={"m": 9.0}, weight=3.0, service={"m": 70.0, "n": 0.0}
    )
    gone = TenantSnapshot(queued=0, running=0, virtual_times={"m": 9.0}, service={"m": 50.0})
    shown = AdmissionMetrics()
    shown.tell(
        replace(state(0, 0, Usage()), virtual_times={"m": 9.0}, tenants={"a": one, "b": gone})
    )
    assert told["fairstream_weight", ("a",)] == 3.0
    service = {key: value for (name, key), value in told.items() if name == "fairstream_service"}
    assert service == {("a", "m"): 70.0, ("b", "m"): 50.0}


def test_a_replica_that_drains_offers_nothing_and_a_model_may_have_none(told: Told) -> None:
    AdmissionMetrics().tell(state(0, 0, Usage()))
    assert told["fairstream_replicas", ("m",)] == 1
    assert told["fairstream_slots", ("m",)] == 4
    assert told["fairstream_replicas", ("cold",)] == 0


def test_it_is_told_now_and_then_only_and_of_few_tenants_at_once(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of who had a request since; of who has one; and once more when that has ended."""
    monkeypatch.setattr(metrics, "PART", 2)
    active = {"acme", "b", "c"}
    shown = AdmissionMetrics()
    parts = [shown.next_part(lambda: active) for _ in range(2)]
    assert [len(part) for part in parts] == [2, 1]
    assert set().union(*parts) == active
    shown.tell(state(1, 0, Usage()))
    assert shown.next_part(set) == ["acme"]
    shown.tell(state(0, 0, Usage()))
    assert shown.next_part(set) == []
    monkeypatch.setattr(metrics, "PERIOD_S", 60.0)
    assert shown.next_part(set) == []
    assert shown.next_part(lambda: active) is None


def test_times_to_tokens_fall_into_buckets_of_seconds(told: Told) -> None:
    """R50."""
    shown = AdmissionMetrics()
    shown.observe([Latency("m", "acme", 0.3, 0.012), Latency("m", "acme", 200.0, None)])
    assert told["fairstream_first_token_seconds", ("acme", "m", "0.5")] == 1
    assert told["fairstream_first_token_seconds", ("acme", "m", "300.0")] == 1
    assert told["fairstream_first_token_seconds_sum", ("acme", "m")] == 200.3
    assert told["fairstream_token_seconds", ("acme", "m", "0.015")] == 1
    assert told["fairstream_token_seconds_sum", ("acme", "m")] == 0.012


def test_a_device_s_time_has_a_state(told: Told) -> None:
    shown = ReplicaMetrics(READY)
    for seconds in (1.0, 2.0):
        gpu = GpuTime(requests=seconds, bubble=0.5, starting=3.0)
        shown.tell(
            Stats(running=2, free_blocks=7, steps=5, preemptions=1, output_tokens=6, compiled=1),
            gpu,
        )
    assert told["fairstream_late_kernels", ()] == 1
    assert told["fairstream_gpu_seconds", ("requests",)] == 2.0
    assert told["fairstream_gpu_seconds", ("bubble",)] == 0.5
    assert told["fairstream_gpu_seconds", ("starting",)] == 3.0
    assert ("fairstream_gpu_seconds", ("spare",)) not in told
    assert told["fairstream_rows", ()] == 2
    assert told["fairstream_kv_blocks_free", ()] == 7
    assert told["fairstream_steps", ()] == 5

"""All metrics for Prometheus, each with its labels and its meaning.

Ray exports them as `ray_fairstream_...`, counters with `_total` behind, and adds the labels
`application`, `deployment` and `replica`. The module knows neither how Ray does that nor who looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from ray.serve import metrics

from replica.messages import Stats
from router.latencies import Latency
from router.ledger import Usage
from router.messages import GpuTime
from router.snapshot import Snapshot

FIRST_TOKEN_S = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300]
"""Bounds of buckets: from an idle server to a model that has to be started."""
TOKEN_S = [0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5]

PERIOD_S = 2.0
"""How often Admission tells. Ray passes on what was told last every ten seconds."""
PART = 100
"""Tenants that are told of at once, which takes milliseconds."""


class RunningSum:
    """A counter that is set from a running sum, which starts at zero."""

    def __init__(self, name: str, meaning: str, *labels: str) -> None:
        self._counter = metrics.Counter(name, meaning, tag_keys=labels)
        self._told: dict[tuple[str, ...], float] = {}

    def tell(self, total: float, **labels: str) -> None:
        key = tuple(labels.values())
        growth = total - self._told.get(key, 0.0)
        if growth > 0:
            self._counter.inc(growth, tags=labels)
            self._told[key] = total


class AdmissionMetrics:
    """Metrics of all requests, by tenant, and of the replicas' capacity."""

    def __init__(self) -> None:
        self._tell_at = 0.0
        self._busy: set[str] = set()
        """Tenants that had requests when they were told of."""
        self._rest: list[str] = []
        self._waiting = metrics.Gauge(
            "fairstream_requests_waiting", "Requests that wait for a place", tag_keys=("tenant",)
        )
        self._running = metrics.Gauge(
            "fairstream_requests_running", "Requests that have a place", tag_keys=("tenant",)
        )
        self._replicas = metrics.Gauge(
            "fairstream_replicas", "Replicas that take requests", tag_keys=("model",)
        )
        self._slots = metrics.Gauge(
            "fairstream_slots", "Places for requests, in all replicas", tag_keys=("model",)
        )
        self._requests = RunningSum(
            "fairstream_requests", "Requests that are over, by outcome", "tenant", "outcome"
        )
        self._slo_met = RunningSum(
            "fairstream_slo_met", "Requests that succeeded in the time promised", "tenant"
        )
        self._tokens = RunningSum(
            "fairstream_tokens", "Tokens: prompt (with cached), cached, output", "tenant", "kind"
        )
        self._dollars = RunningSum(
            "fairstream_dollars", "What requests cost their tenants, in dollars", "tenant"
        )

        self._first_token_s = metrics.Histogram(
            "fairstream_first_token_seconds",
            "From the arrival of a request to its first token",
            boundaries=FIRST_TOKEN_S,
            tag_keys=("model",),
        )
        self._token_s = metrics.Histogram(
            "fairstream_token_seconds",
            "Mean time between later tokens of a request",
            boundaries=TOKEN_S,
            tag_keys=("model",),
        )

    def observe(self, latencies: Iterable[Latency]) -> None:
        """Each once."""
        for model, first_token_s, token_s in latencies:
            self._first_token_s.observe(first_token_s, tags={"model": model})
            if token_s is not None:
                self._token_s.observe(token_s, tags={"model": model})

    def next_part(self, take_active: Callable[[], set[str]]) -> list[str] | None:
        """Which tenants to tell of now; None while there is nothing to be told.

        Every `PERIOD_S` it is those that had a request since, and those that had one open: so many
        at once that nobody waits for it, and the others when it is asked next.
        """
        if not self._rest:
            if time.monotonic() < self._tell_at:
                return None
            self._tell_at = time.monotonic() + PERIOD_S
            self._rest = list(take_active() | self._busy)
        part, self._rest = self._rest[:PART], self._rest[PART:]
        return part

    def tell(self, state: Snapshot) -> None:
        """Set the metrics of the tenants in `state`."""
        self._tell_replicas(state)
        self._tell_queues(state)
        for tenant, usage in state.usage.items():
            self._tell_usage(tenant, usage)

    def _tell_replicas(self, state: Snapshot) -> None:
        """Set the metrics of every known model, even one without replicas."""
        replicas = state.replicas.values()
        for model in state.waiting.keys() | {replica.model for replica in replicas}:
            slots = [one.slots for one in replicas if one.model == model and one.slots]
            self._replicas.set(len(slots), tags={"model": model})
            self._slots.set(sum(slots), tags={"model": model})

    def _tell_queues(self, state: Snapshot) -> None:
        """Of tenants that have requests, and once more of those that had."""
        for name, tenant in state.tenants.items():
            is_busy = bool(tenant.queued or tenant.running)
            if is_busy or name in self._busy:
                self._waiting.set(tenant.queued, tags={"tenant": name})
                self._running.set(tenant.running, tags={"tenant": name})
            (self._busy.add if is_busy else self._busy.discard)(name)

    def _tell_usage(self, tenant: str, usage: Usage) -> None:
        for outcome, count in usage.outcomes.items():
            self._requests.tell(count, tenant=tenant, outcome=outcome.value)
        self._requests.tell(usage.refused, tenant=tenant, outcome="refused")
        self._slo_met.tell(usage.slo_met, tenant=tenant)
        self._tokens.tell(usage.prompt_tokens, tenant=tenant, kind="prompt")
        self._tokens.tell(usage.cached_tokens, tenant=tenant, kind="cached")
        self._tokens.tell(usage.output_tokens, tenant=tenant, kind="output")
        self._dollars.tell(usage.micro_dollars / 1e6, tenant=tenant)


class IngressMetrics:
    """Metrics of one HTTP front end."""

    def __init__(self) -> None:
        self._refusals = RunningSum(
            "fairstream_refusals", "Answers that were errors, by their code", "tenant", "reason"
        )

    def tell(self, refusals: Mapping[tuple[str, str], int]) -> None:
        """By tenant and reason, since the start. Who has no valid key is told as "-"."""
        for (tenant, reason), count in refusals.items():
            self._refusals.tell(count, tenant=tenant or "-", reason=reason)


class ReplicaMetrics:
    """Metrics of one engine."""

    def __init__(self) -> None:
        self._gpu_seconds = RunningSum(
            "fairstream_gpu_seconds", "What became of the device's time, by state", "state"
        )
        self._tokens = RunningSum("fairstream_engine_tokens", "Tokens computed", "kind")
        self._steps = RunningSum("fairstream_steps", "Steps")
        self._preemptions = RunningSum("fairstream_preemptions", "Sequences put back for memory")
        self._late_kernels = RunningSum(
            "fairstream_late_kernels", "Kernels compiled or loaded since the engine was ready"
        )
        self._rows = metrics.Gauge("fairstream_rows", "Sequences in a step")
        self._free_blocks = metrics.Gauge("fairstream_kv_blocks_free", "KV blocks that are free")

    def tell(self, stats: Stats, gpu: GpuTime) -> None:
        for state, seconds in asdict(gpu).items():
            self._gpu_seconds.tell(seconds, state=state)
        self._tokens.tell(stats.prompt_tokens, kind="prompt")
        self._tokens.tell(stats.output_tokens, kind="output")
        self._steps.tell(stats.steps)
        self._preemptions.tell(stats.preemptions)
        self._late_kernels.tell(stats.compiled)
        self._rows.set(stats.running)
        self._free_blocks.set(stats.free_blocks)

"""All metrics, each with its labels and its meaning.

Ray exports them as `ray_fairstream_...` and adds the labels `application`, `deployment` and
`replica`; `GET /metrics` tells them as they are called here, with `ingress` or `replica` where a
process has its own. Counters have `_total` behind. The module knows not who looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

import msgspec

from replica.messages import Ready, Stats
from router.latencies import Latency
from router.ledger import Usage
from router.messages import GpuTime, HeldBack
from router.pricing import MICRO
from router.snapshot import Snapshot, TenantSnapshot
from serve_app.telemetry.instruments import OTHER, Instruments, Tenants
from serve_app.telemetry.records import GAP_BOUNDS_S, RequestRecord

FIRST_TOKEN_S = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300]
"""Bounds of buckets: from an idle server to a model that has to be started."""
TOKEN_S = [0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5]
REQUEST_S = [0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600]
PHASE_S = [0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1, 2.5, 10, 25, 60, 300]
REQUEST_TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144]

PERIOD_S = 2.0
"""How often each process tells. Ray passes on what was told last every ten seconds."""
PART = 100
"""Tenants that are told of at once, which takes milliseconds."""
HELD_BACK_MEANS = (
    "Whether the tenant's next request waits, by why: its own concurrency, others that had less"
    " than their share, no place for anybody, or no replica in service"
)
AHEAD_MEANS = "How far a tenant's counter is above the virtual time: it waits for who is behind"

SERVICE_MEANS = "What a tenant was served, in tokens as the fair order counts them"


class AdmissionMetrics:
    """Metrics of all requests, by tenant, and of the replicas' capacity."""

    def __init__(self) -> None:
        self._tell_at = 0.0
        self._busy: set[str] = set()
        """Tenants that had requests when they were told of."""
        self._rest: list[str] = []
        self._labels = Tenants()
        self.instruments = made = Instruments()
        self._waiting = made.gauge(
            "fairstream_requests_waiting", "Requests that wait for a place", "tenant"
        )
        self._running = made.gauge(
            "fairstream_requests_running", "Requests that have a place", "tenant"
        )
        of_model = ("tenant", "model")
        self._held_back = made.gauge("fairstream_held_back", HELD_BACK_MEANS, *of_model, "reason")
        self._ahead = made.gauge("fairstream_service_ahead", AHEAD_MEANS, *of_model)
        self._weight = made.gauge("fairstream_weight", "A tenant's part beside others'", "tenant")
        self._service = made.sum("fairstream_service", SERVICE_MEANS, *of_model)
        self._rates = made.gauge(
            "fairstream_rate_left", "What is left of a limit by minute", "tenant", "limit"
        )
        self._budgets = made.gauge(
            "fairstream_budget_left_dollars", "What is not spent of a budget", "tenant", "period"
        )
        self._replicas = made.gauge("fairstream_replicas", "Replicas that take requests", "model")
        self._slots = made.gauge(
            "fairstream_slots", "Places for requests, in all replicas", "model"
        )
        self._credits = made.gauge(
            "fairstream_credits", "Places that are free, in all replicas", "model"
        )
        self._requests = made.sum(
            "fairstream_requests", "Requests that are over, by outcome", "tenant", "outcome"
        )
        self._slo_met = made.sum(
            "fairstream_slo_met", "Requests that succeeded in the time promised", "tenant"
        )
        self._tokens = made.sum(
            "fairstream_tokens", "Tokens: prompt (with cached), cached, output", "tenant", "kind"
        )
        self._dollars = made.sum(
            "fairstream_dollars", "What requests cost their tenants, in dollars", "tenant"
        )
        self._first_token_s = made.histogram(
            "fairstream_first_token_seconds",
            "From the arrival of a request to its first token",
            FIRST_TOKEN_S,
            *of_model,
        )
        self._token_s = made.histogram(
            "fairstream_token_seconds",
            "Mean time between later tokens of a request",
            TOKEN_S,
            *of_model,
        )

    def observe(self, latencies: Iterable[Latency]) -> None:
        """Each once."""
        for model, tenant, first_token_s, token_s in latencies:
            labels = {"tenant": self._labels.label(tenant), "model": model}
            self._first_token_s.observe(first_token_s, **labels)
            if token_s is not None:
                self._token_s.observe(token_s, **labels)

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
            offered = [one for one in replicas if one.model == model and one.slots]
            self._replicas.set(len(offered), model=model)
            self._slots.set(sum(one.slots for one in offered), model=model)
            free = sum(max(one.slots - one.leases, 0) for one in offered)
            self._credits.set(free, model=model)

    def _tell_queues(self, state: Snapshot) -> None:
        """Of tenants that have requests, and once more of those that had."""
        for name, tenant in state.tenants.items():
            is_busy = bool(tenant.queued or tenant.running)
            told = is_busy or name in self._busy
            if told and (label := self._labels.label(name)) != OTHER:
                self._waiting.set(tenant.queued, tenant=label)
                self._running.set(tenant.running, tenant=label)
                self._tell_limits(label, tenant)
                self._tell_turns(label, tenant, state.virtual_times)
            for model, cost in tenant.service.items():
                self._service.tell(cost, name, tenant=self._labels.label(name), model=model)
            (self._busy.add if is_busy else self._busy.discard)(name)

    def _tell_limits(self, label: str, tenant: TenantSnapshot) -> None:
        self._weight.set(tenant.weight, tenant=label)
        for limit, left in tenant.rates_left.items():
            self._rates.set(left, tenant=label, limit=limit)
        for period, micro_dollars in tenant.unspent_micro_dollars.items():
            self._budgets.set(micro_dollars / MICRO, tenant=label, period=period)

    def _tell_turns(
        self, label: str, tenant: TenantSnapshot, virtual_times: Mapping[str, float]
    ) -> None:
        for model, value in tenant.virtual_times.items():
            self._ahead.set(value - virtual_times[model], tenant=label, model=model)
            why = tenant.held_back.get(model)
            for reason in HeldBack:
                self._held_back.set(reason == why, tenant=label, model=model, reason=reason.value)

    def _tell_usage(self, tenant: str, usage: Usage) -> None:
        label = self._labels.label(tenant)
        for outcome, count in usage.outcomes.items():
            self._requests.tell(count, tenant, tenant=label, outcome=outcome.value)
        self._requests.tell(usage.refused, tenant, tenant=label, outcome="refused")
        self._slo_met.tell(usage.slo_met, tenant, tenant=label)
        self._tokens.tell(usage.prompt_tokens, tenant, tenant=label, kind="prompt")
        self._tokens.tell(usage.cached_tokens, tenant, tenant=label, kind="cached")
        self._tokens.tell(usage.output_tokens, tenant, tenant=label, kind="output")
        self._dollars.tell(usage.micro_dollars / MICRO, tenant, tenant=label)


class IngressMetrics:
    """Metrics of one HTTP front end."""

    def __init__(self) -> None:
        self._labels = Tenants()
        self.instruments = made = Instruments()
        self._refusals = made.sum(
            "fairstream_refusals", "Answers that were errors, by their code", "tenant", "reason"
        )
        self._request_s = made.histogram(
            "fairstream_request_seconds",
            "From a request's head to the end of its answer",
            REQUEST_S,
            "tenant",
            "model",
        )
        self._queue_s = made.histogram(
            "fairstream_queue_seconds", "Waiting for a place", FIRST_TOKEN_S, "tenant", "model"
        )
        self._gap_s = made.histogram(
            "fairstream_gap_seconds",
            "Between the tokens of a sequence, as they come from the engine",
            GAP_BOUNDS_S,
            "model",
        )
        self._phase_s = made.histogram(
            "fairstream_phase_seconds", "Where a request's time went", PHASE_S, "model", "phase"
        )
        self._held_back_s = made.histogram(
            "fairstream_held_back_seconds",
            "How long a request waited for a place, by why: as `fairstream_held_back`, or `asking`"
            " until Admission has answered",
            FIRST_TOKEN_S,
            "model",
            "reason",
        )
        self._sizes = made.histogram(
            "fairstream_request_tokens", "Tokens of a request", REQUEST_TOKENS, "model", "kind"
        )

    def tell(self, refusals: Mapping[tuple[str, str], int]) -> None:
        """By tenant and reason, since the start. Who has no valid key is told as "-"."""
        for (tenant, reason), count in refusals.items():
            label = self._labels.label(tenant) if tenant else "-"
            self._refusals.tell(count, tenant, tenant=label, reason=reason)

    def observe(self, record: RequestRecord) -> None:
        """A request that was let in is over."""
        model, phases = record.model, record.breakdown.so_far()
        labels = {"tenant": self._labels.label(record.tenant), "model": model}
        self._request_s.observe(sum(phases.values()), **labels)
        self._queue_s.observe(max(each.queued_s for each in record.sequences), **labels)
        for phase, seconds in phases.items():
            self._phase_s.observe(seconds, model=model, phase=phase.value)
        for why, seconds in record.held_back().items():
            self._held_back_s.observe(seconds, model=model, reason=why)
        for kind, tokens in record.tokens().items():
            self._sizes.observe(tokens, model=model, kind=kind)
        self._gap_s.add(record.gaps.counts, record.gaps.seconds, model=model)


class ReplicaMetrics:
    """Metrics of one engine."""

    def __init__(self, ready: Ready) -> None:
        self._ready = ready
        self.instruments = made = Instruments()
        self._gpu_seconds = made.sum(
            "fairstream_gpu_seconds", "What became of the device's time, by state", "state"
        )
        self._limits = made.sum(
            "fairstream_step_seconds",
            "What a busy device's time went on, by the engine's cost model",
            "limit",
        )
        self._host_s = made.sum(
            "fairstream_host_seconds", "Processor time of the loop of steps, without waiting"
        )
        self._tokens = made.sum(
            "fairstream_engine_tokens", "Tokens, by what became of them", "kind"
        )
        self._steps = made.sum("fairstream_steps", "Steps")
        self._parts = made.sum(
            "fairstream_step_parts", "Forward passes and samplings, by how they ran", "way"
        )
        self._idle_rows = made.sum(
            "fairstream_wasted_rows", "Rows computed for nobody, by why", "kind"
        )
        self._preemptions = made.sum("fairstream_preemptions", "Sequences put back for memory")
        self._finished = made.sum("fairstream_finished", "Sequences that ended, by why", "reason")
        self._late_kernels = made.sum(
            "fairstream_late_kernels", "Kernels compiled or loaded since the engine was ready"
        )
        self._rows = made.gauge("fairstream_rows", "Sequences in a step")
        self._free_blocks = made.gauge("fairstream_kv_blocks_free", "KV blocks that are free")
        self._sequences = made.gauge(
            "fairstream_engine_requests", "Sequences in the engine", "state"
        )
        self._kv_used = made.gauge(
            "fairstream_kv_usage_ratio", "Part of the KV blocks that is in use"
        )
        self._kv_waste = made.gauge(
            "fairstream_kv_fragmented_ratio", "Part of running rows' blocks that holds no token"
        )
        config = made.gauge(
            "fairstream_cache_config_info", "1; the KV pool", "block_size", "num_blocks"
        )
        sizes = {"block_size": str(ready.block_size), "num_blocks": str(ready.num_blocks)}
        config.set(1, **sizes)

    def tell(self, stats: Stats, gpu: GpuTime) -> None:
        for state, seconds in asdict(gpu).items():
            self._gpu_seconds.tell(seconds, state=state)
        for limit, seconds in msgspec.structs.asdict(stats.limits).items():
            self._limits.tell(seconds, limit=limit)
        self._host_s.tell(stats.host_s)
        self._tokens.tell(stats.prompt_tokens, kind="prompt")
        self._tokens.tell(stats.cached_tokens, kind="cached")
        self._tokens.tell(stats.prompt_tokens + stats.cached_tokens, kind="asked")
        self._tokens.tell(stats.output_tokens, kind="output")
        self._steps.tell(stats.steps)
        self._parts.tell(stats.graph_replays, way="graph")
        self._parts.tell(stats.eager_parts, way="eager")
        self._idle_rows.tell(stats.padding_rows, kind="padding")
        self._idle_rows.tell(stats.surplus_rows, kind="surplus")
        self._preemptions.tell(stats.preemptions)
        for reason, count in stats.finished.items():
            self._finished.tell(count, reason=reason)
        self._late_kernels.tell(stats.compiled)
        self._rows.set(stats.running)
        self._free_blocks.set(stats.free_blocks)
        self._sequences.set(stats.running, state="running")
        self._sequences.set(stats.waiting, state="waiting")
        self._kv_used.set(1 - stats.free_blocks / self._ready.num_blocks)
        self._kv_waste.set(1 - stats.kv_tokens / stats.kv_slots if stats.kv_slots else 0.0)

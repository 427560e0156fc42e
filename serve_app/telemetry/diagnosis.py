"""What limits a server, from readings of its metrics: where its devices' time went, and where its
requests' did.

Devices come first: one that computes for requests is what users pay for, so what keeps it from that
is the bottleneck. Where devices have time to spare, the requests' own time says who waits for whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from serve_app.telemetry.readings import Readings


class Cause(str, Enum):
    """Of a verdict."""

    TOO_LITTLE = "too little to say"
    NO_DEMAND = "no demand"
    NOTHING = "nothing is wrong"
    SLOW_READERS = "slow readers"
    FRONT_END = "tokenizer and HTTP"
    QUOTA = "a tenant's own limits"
    FEEDING = "Admission does not feed the engines"
    CPU = "the CPU holds the device up"
    KV = "KV memory"
    PROMPTS = "prompts"
    PLACES = "too few places"
    DEVICE = "the devices are full"


@dataclass(frozen=True)
class Verdict:
    cause: Cause
    evidence: str
    advice: str
    worth: str = ""
    """What would come of following it, as far as can be told."""


MIN_SECONDS, MIN_REQUESTS = 8.0, 3
"""Less than this says nothing."""
IDLE = 0.9
"""A device that is spare for so much of its time has nothing to do."""
LOST = 0.1
"""Of a device's time; less is not worth a change."""
LONG = 0.3
"""Of the requests' time; with less, a phase is not what they wait for."""
PREEMPTED = 0.05
"""Of the sequences that ended."""
REFUSED = 0.1
"""Of the requests that came."""
MUCH_FREE = 0.25
"""Of the places. A few are kept for newcomers."""
HELD = 0.5
"""Of the readings."""
ALMOST_FREE = 0.5
"""Of a step's time, on what more rows would not add to."""
OF_PROMPTS = 0.5
"""Of the requests' time until and with decoding."""


@dataclass(frozen=True)
class Facts:
    """What the rules look at; shares are parts of 1."""

    seconds: float
    requests: float
    """That ended."""
    device: Mapping[str, float]
    """Shares of the devices' time, by state."""
    phases: Mapping[str, float]
    """Shares of the requests' time, by phase."""
    held_back: Mapping[str, list[str]]
    """Tenants whose next request waits most of the time, by why."""
    limited: Mapping[str, float]
    """Requests refused for a limit of their tenant, by tenant."""
    preempted: float
    ended: float
    """Sequences."""
    kv_used: float
    free: float
    """Share of the places that no request has."""
    output_per_s: float
    limits: Mapping[str, float]
    """Shares of the busy devices' time, by what it went on."""

    @classmethod
    def of(cls, readings: Readings) -> Facts:
        sequences = readings.growth("fairstream_finished_total").get((), 0.0)
        used = readings.value("fairstream_kv_usage_ratio", "replica").values()
        limits = ("rate_limit_exceeded", "insufficient_quota")
        refused = readings.growth("fairstream_refusals_total", "tenant", "reason")
        waits = readings.mean("fairstream_held_back", "tenant", "reason")
        held: dict[str, list[str]] = {}
        for (tenant, why), share in waits.items():
            if share >= HELD:
                held.setdefault(why, []).append(tenant)
        free = readings.mean("fairstream_credits").get((), 0.0)
        slots = readings.mean("fairstream_slots").get((), 0.0)
        output = readings.rate("fairstream_engine_tokens_total", kind="output")
        return cls(
            seconds=readings.seconds,
            requests=readings.growth("fairstream_request_seconds_count").get((), 0.0),
            device=_shares(readings.growth("fairstream_gpu_seconds_total", "state")),
            phases=_shares(readings.growth("fairstream_phase_seconds_sum", "phase")),
            held_back=held,
            limited={
                tenant: count
                for (tenant, reason), count in refused.items()
                if reason in limits and count
            },
            preempted=readings.growth("fairstream_preemptions_total").get((), 0.0),
            ended=sequences,
            kv_used=max(used, default=0.0),
            free=free / slots if slots else 0.0,
            output_per_s=output.get((), 0.0),
            limits=_shares(readings.growth("fairstream_step_seconds_total", "limit")),
        )

    def faster(self, share: float) -> str:
        """What there would be to gain if devices computed for requests in this share, too."""
        computing = self.device.get("requests", 0.0)
        if not computing or not self.output_per_s:
            return ""
        more = self.output_per_s * share / computing
        return f"up to {more:,.0f} tokens/s more, of {self.output_per_s:,.0f} now"


def diagnose(facts: Facts) -> Verdict:
    """The first rule that holds."""
    return next(verdict for rule in RULES if (verdict := rule(facts)) is not None)


def _too_little(facts: Facts) -> Verdict | None:
    if facts.seconds >= MIN_SECONDS and facts.device:
        return None
    if facts.seconds >= MIN_SECONDS:
        return Verdict(Cause.TOO_LITTLE, "no engine tells of itself", "is there a replica yet?")
    seen = f"{facts.seconds:.0f} s of metrics"
    return Verdict(Cause.TOO_LITTLE, seen, f"watch for {MIN_SECONDS:.0f} s or longer")


def _kv(facts: Facts) -> Verdict | None:
    put_back = facts.preempted > PREEMPTED * max(facts.ended, 1.0)
    held = facts.held_back.get("capacity") and facts.free >= MUCH_FREE
    if not put_back and not held:
        return None
    evidence = (
        f"KV {facts.kv_used:.0%} full; {facts.preempted:.0f} sequences were put back for memory"
    )
    if held:
        evidence += f"; requests wait although {facts.free:.0%} of the places are free"
    advice = "more engine.kv_tokens, smaller max_tokens, or another replica"
    return Verdict(Cause.KV, evidence, advice)


def _cpu(facts: Facts) -> Verdict | None:
    bubble = facts.device.get("bubble", 0.0)
    if bubble < LOST:
        return None
    evidence = f"devices idled with work in the engine for {bubble:.0%} of the time"
    advice = "give the engine's process a core of its own; is its pod throttled?"
    return Verdict(Cause.CPU, evidence, advice, facts.faster(bubble))


def _limits(facts: Facts) -> Verdict | None:
    """Whoever waits does so for a limit of its own."""
    asked = facts.requests + sum(facts.limited.values())
    refused = sum(facts.limited.values())
    waiting = facts.held_back.get("concurrency", [])
    others = [*facts.held_back.get("fair_share", []), *facts.held_back.get("capacity", [])]
    could_run = _has_time(facts) or facts.free >= MUCH_FREE
    if others or not could_run or (not waiting and refused <= REFUSED * asked):
        return None
    names = ", ".join(sorted({*facts.limited, *waiting})[:5])
    evidence = f"{names}: {refused:.0f} of {asked:.0f} requests refused for a limit"
    if waiting:
        evidence += ", others wait for max_concurrency"
    advice = "raise the tenant's limits, if it should have more: there is room"
    return Verdict(Cause.QUOTA, evidence, advice)


def _feeding(facts: Facts) -> Verdict | None:
    starved = facts.device.get("starved", 0.0)
    if starved < LOST:
        return None
    evidence = f"devices idled while requests waited at Admission for {starved:.0%} of the time"
    advice = (
        "more lookahead, or smaller max_tokens: KV room is kept for the longest answer asked for"
    )
    return Verdict(Cause.FEEDING, evidence, advice, facts.faster(starved))


def _readers(facts: Facts) -> Verdict | None:
    share = facts.phases.get("send", 0.0)
    if share < LONG:
        return None
    evidence = f"{share:.0%} of the requests' time went on clients that read slowly"
    return Verdict(Cause.SLOW_READERS, evidence, "nothing here: look at clients and their network")


def _front_end(facts: Facts) -> Verdict | None:
    share = sum(facts.phases.get(phase, 0.0) for phase in ("read", "prepare", "text"))
    if share < LONG:
        return None
    evidence = f"{share:.0%} of the requests' time went on reading, tokenizing and writing text"
    return Verdict(Cause.FRONT_END, evidence, "more ingresses; HAProxy in front; shorter schemas")


def _no_demand(facts: Facts) -> Verdict | None:
    spare = facts.device.get("spare", 0.0)
    if spare < IDLE:
        return None
    evidence = (
        f"devices had nothing to do for {spare:.0%} of the time; {facts.requests:.0f} requests"
    )
    return Verdict(Cause.NO_DEMAND, evidence, "fewer replicas, if it stays so")


def _few(facts: Facts) -> Verdict | None:
    if facts.requests >= MIN_REQUESTS:
        return None
    evidence = f"{facts.requests:.0f} requests ended in {facts.seconds:.0f} s"
    return Verdict(Cause.TOO_LITTLE, evidence, "watch for longer")


def _prompts(facts: Facts) -> Verdict | None:
    first, decode = facts.phases.get("prefill", 0.0), facts.phases.get("decode", 0.0)
    if _has_time(facts) or first <= OF_PROMPTS * (first + decode):
        return None
    evidence = f"{first:.0%} of the requests' time went on prompts, {decode:.0%} on their answers"
    advice = "prompts that begin alike, so that they are cached; or more replicas"
    return Verdict(Cause.PROMPTS, evidence, advice)


def _places(facts: Facts) -> Verdict | None:
    """Rows share the reading of the weights: with few of them, most of a step is that."""
    shared = facts.limits.get("weights", 0.0)
    waiting = facts.held_back.get("capacity") or facts.held_back.get("fair_share")
    if not waiting or shared < ALMOST_FREE or facts.kv_used >= ALMOST_FREE:
        return None
    evidence = (
        f"requests wait, KV is {facts.kv_used:.0%} full, and {shared:.0%} of the devices' time "
        "goes on reading weights, which more rows would share"
    )
    # Twice the rows take the shared part once.
    more = facts.output_per_s * (2 / (2 - shared) - 1)
    worth = f"about {more:,.0f} tokens/s more with twice the rows, of {facts.output_per_s:,.0f} now"
    return Verdict(Cause.PLACES, evidence, "a higher engine.max_rows", worth)


def _full(facts: Facts) -> Verdict | None:
    if _has_time(facts) or not facts.held_back:
        return None
    names = sorted({name for several in facts.held_back.values() for name in several})
    computing = facts.device.get("requests", 0.0)
    evidence = (
        f"devices computed for requests {computing:.0%} of the time, and {len(names)} tenants wait"
    )
    if facts.limits:
        memory = sum(facts.limits.get(name, 0.0) for name in ("weights", "keys"))
        products = sum(facts.limits.get(name, 0.0) for name in ("tokens", "attention"))
        evidence += f"; {memory:.0%} of it reads memory, {products:.0%} is arithmetic"
    return Verdict(Cause.DEVICE, evidence, "more replicas: each adds what one does now")


def _nothing(facts: Facts) -> Verdict:
    computing = facts.device.get("requests", 0.0)
    evidence = f"devices computed for requests {computing:.0%} of the time, and nobody waits"
    return Verdict(Cause.NOTHING, evidence, "leave it as it is")


def _has_time(facts: Facts) -> bool:
    return facts.device.get("spare", 0.0) >= LONG


RULES: tuple[Callable[[Facts], Verdict | None], ...] = (
    _too_little,
    _kv,
    _cpu,
    _limits,
    _feeding,
    _readers,
    _front_end,
    _no_demand,
    _few,
    _places,
    _prompts,
    _full,
    _nothing,
)


def _shares(parts: Mapping[tuple[str, ...], float]) -> dict[str, float]:
    whole = sum(parts.values())
    return {name: part / whole for (name,), part in parts.items()} if whole > 0 else {}


def told(verdict: Verdict, facts: Facts) -> dict[str, Any]:
    """For programs: values for JSON."""
    return {
        "seconds": facts.seconds,
        **asdict(verdict),
        "devices": facts.device,
        "busy_with": facts.limits,
        "requests": facts.phases,
    }


def lines(verdict: Verdict, facts: Facts) -> Iterator[str]:
    """For people."""
    yield verdict.cause.value
    yield f"  because  {verdict.evidence}"
    yield f"  change   {verdict.advice}"
    if verdict.worth:
        yield f"  worth    {verdict.worth}"
    shown = (("devices", facts.device), ("busy with", facts.limits), ("requests", facts.phases))
    for title, shares in shown:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
        yield f"{title:<10}{parts or '-'}"

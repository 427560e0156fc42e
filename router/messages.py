"""What an ingress, a replica and the router tell each other. Plain values, no behaviour.

The conversation is level-triggered: each `Sync` carries the state of one ingress, of what waits
maybe the changes since an earlier one, and may be repeated, lost or answered late without harm.
Grants are repeated in every reply until the ingress shows the request as leased.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Outcome(str, Enum):
    """How a request ended; each ends in exactly one way."""

    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    FAILED = "failed"


class RefusalKind(str, Enum):
    """Why a request is not served; what clients read as the error's code."""

    RATE = "rate_limit_exceeded"
    """Over a rate, or too many wait already (429)."""
    BUDGET = "insufficient_quota"
    """The money of a window is spent or held (429)."""
    TOO_DEAR = "budget_too_small"
    """The whole budget of a window does not pay for it, so it never will (400)."""
    OVERLOAD = "overloaded"
    """Too much waits, whoever it belongs to (503)."""
    DEADLINE = "deadline_exceeded"
    """The request waited for longer than its tenant's `max_wait_s` (504)."""


class HeldBack(str, Enum):
    """Why the next request of a tenant waits."""

    CONCURRENCY = "concurrency"
    """As many run as the tenant may have."""
    FAIR_SHARE = "fair_share"
    """Others that had less service come first."""
    CAPACITY = "capacity"
    """It is next, and no replica has room."""
    NO_REPLICA = "no_replica"
    """There is no replica in service."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request as the router sees it: costs and ids, never prompts."""

    request_id: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    attempt: int = 0
    """Grows by one each time the request starts again elsewhere."""
    open_ended: bool = False
    """The client named no limit: `max_tokens` is a default, and rates hold what is likely."""
    model: str = ""
    """The name that its replicas report, whatever alias the client used."""
    prefixes: tuple[int, ...] = ()
    """Hashes of the first 64, 128, 256, ... prompt tokens, the tenant's cache domain included."""
    priority: int = 0
    """Among what waits of the same tenant, the least goes first."""
    group: str = ""
    """What a client asked for at once: requests in a row that are all admitted or all refused.
    Empty of one that is alone."""


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A granted request and what has come of it so far. The numbers only grow."""

    request: RequestInfo
    replica: str
    produced: int = 0
    """Output tokens received."""
    cached: int | None = None
    """Prompt tokens found in the replica's prefix cache; None until its first report."""
    gpu_s: float = 0.0
    """Its share of GPUs' time, in seconds."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that is over. Sent in every sync until a reply acknowledges it."""

    request: RequestInfo
    outcome: Outcome
    produced: int
    cached: int | None = None
    first_token_s: float | None = None
    """Seconds from its arrival to its first token, if there was one ..."""
    last_token_s: float | None = None
    """... and to its last."""
    gpu_s: float = 0.0
    """Its share of GPUs' time, in seconds, as its ingress saw it last."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """One rate of a tenant at one moment."""

    limit: int
    """Units a minute."""
    remaining: int
    reset_s: float
    """Seconds until everything remains, if nothing more is used."""


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Both rates of a tenant; None where it has no limit."""

    requests: RateLimit | None = None
    tokens: RateLimit | None = None

    def left(self) -> dict[str, int]:
        """What remains, by "requests" and "tokens"."""
        rates = {"requests": self.requests, "tokens": self.tokens}
        return {name: rate.remaining for name, rate in rates.items() if rate is not None}


@dataclass(frozen=True, slots=True)
class Sync:
    """The state of one ingress: the whole of it, but for `base`."""

    ingress: str
    sequence: int
    """Grows with every sync of this ingress; an older one than was seen is ignored."""
    epoch: int
    """Epoch of the last reply, 0 at first."""
    waiting: tuple[RequestInfo, ...] = ()
    leases: tuple[LeaseInfo, ...] = ()
    endings: tuple[Ending, ...] = ()
    virtual_times: dict[str, dict[str, float]] = field(default_factory=dict)
    """By model and tenant, as the last reply gave them: a restarted router resumes from these."""
    rates: dict[str, RateLimits] = field(default_factory=dict)
    """What is used of tenants' rates, refilled since it was told: those of the last reply; in the
    sync that follows the first reply of a new epoch, all that earlier ones told."""
    rates_epoch: int = 0
    """Epoch of who told them."""
    sleepers: dict[str, int] = field(default_factory=dict)
    """By model, requests that cannot be shown yet: no replica has run that told what it serves."""
    answers: int = 0
    """HTTP answers that clients still wait for, of any kind of request."""
    base: int | None = None
    """The sync, answered by the router of `epoch`, that `waiting` tells the changes since: what has
    come, or has another attempt. None where it is all that waits."""
    gone: tuple[str, ...] = ()
    """Ids of what may have been shown as waiting, in that sync or since, and does no more."""
    admitted: int = 0
    """The first so many of `waiting` were in a sync that was answered, and not refused; those on a
    later attempt were, too, wherever they are."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to run one attempt of a request on one replica."""

    request_id: str
    attempt: int
    replica: str
    max_tokens: int
    """Output that the tenant can pay for, at most what was asked."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that will not be served. Nothing was charged or counted for it."""

    request_id: str
    reason: str
    retry_after_s: float
    kind: RefusalKind = RefusalKind.RATE
    closed_s: float = 0.0
    """For so long, unless something of the tenant's begins or ends before, whatever it asks for
    would be refused, too."""


@dataclass(frozen=True, slots=True)
class SyncReply:
    epoch: int
    grants: tuple[Grant, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    settled: tuple[str, ...] = ()
    """Ids of the endings that were booked, now or before."""
    virtual_times: dict[str, dict[str, float]] = field(default_factory=dict)
    """By model and tenant."""
    rate_limits: dict[str, RateLimits] = field(default_factory=dict)
    """By tenant, for the tenants that the sync named."""
    held_back: dict[str, dict[str, HeldBack]] = field(default_factory=dict)
    """By model and tenant, why the next request waits, where one does."""
    lost: bool = False
    """The base of the sync is not known, so it is as if it had never come: all is to be shown."""


@dataclass(frozen=True, slots=True)
class GpuTime:
    """What became of a GPU's seconds; the fields add up to wall time."""

    requests: float = 0.0
    """Computed for requests."""
    surplus: float = 0.0
    """Computed for nobody: padding, and rows whose requests had ended."""
    bubble: float = 0.0
    """Idle with work in the replica."""
    starved: float = 0.0
    """Idle with work at the router only."""
    spare: float = 0.0
    """Idle, and nobody waited."""
    starting: float = 0.0
    """Before the replica was ready."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's capacity, sent at a fixed interval. HangDetector withdraws its credits."""

    replica: str
    slots: int
    """Requests that it takes at once: its rows and a small lookahead; 0 while draining."""
    kv_tokens: int
    """Tokens its KV pool holds."""
    lookahead: int = 0
    """How many of the slots are beyond its rows."""
    gpu: GpuTime | None = None
    """Since the replica began to start; None from who does not know."""
    model: str = ""
    """Which it serves: the pool that it belongs to."""


@dataclass(frozen=True, slots=True)
class ReportReply:
    """What a replica hears when it has reported."""

    backlog: bool
    """Requests wait for a credit of its model."""
    others: bool
    """Another replica of its model offers slots."""

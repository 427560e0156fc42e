"""What an ingress, a replica and the router tell each other. Plain values, no behaviour.

The conversation is level-triggered: each `Sync` carries the full state of one ingress and may
be repeated, lost or answered late without harm. Grants are repeated in every reply until the
ingress shows the request as leased.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Outcome(str, Enum):
    """How a request ended; each ends in exactly one way."""

    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request as the router sees it: costs and ids, never prompts."""

    request_id: str
    tenant: str
    prompt_tokens: int
    max_tokens: int
    attempt: int = 0
    """Grows by one each time the request starts again elsewhere."""


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A granted request and what has come of it so far. The numbers only grow."""

    request: RequestInfo
    replica: str
    produced: int = 0
    """Output tokens received."""
    cached: int | None = None
    """Prompt tokens found in the replica's prefix cache; None until its first report."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that is over. Sent in every sync until a reply acknowledges it."""

    request: RequestInfo
    outcome: Outcome
    produced: int
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Sync:
    """The whole state of one ingress."""

    ingress: str
    sequence: int
    """Grows with every sync of this ingress; an older one than was seen is ignored."""
    epoch: int
    """Epoch of the last reply, 0 at first."""
    waiting: tuple[RequestInfo, ...] = ()
    leases: tuple[LeaseInfo, ...] = ()
    endings: tuple[Ending, ...] = ()
    virtual_times: dict[str, float] = field(default_factory=dict)
    """Per tenant, as the last reply gave them: a restarted router resumes from these."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to run one attempt of a request on one replica."""

    request_id: str
    attempt: int
    replica: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that will not be queued (429). Nothing was charged or counted for it."""

    request_id: str
    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class SyncReply:
    epoch: int
    grants: tuple[Grant, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    settled: tuple[str, ...] = ()
    """Ids of the endings that were booked, now or before."""
    virtual_times: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's capacity, sent at a fixed interval. Silence withdraws its credits."""

    replica: str
    slots: int
    """Requests that it takes at once: its rows and a small lookahead; 0 while draining."""
    kv_tokens: int
    """Tokens its KV pool holds."""

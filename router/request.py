"""A request while the router knows it, and what it holds at the moment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from router.messages import RequestInfo
from router.quota import Reservation


class State(Enum):
    """What a request reservations: a place in the queue, a credit, or nothing."""

    QUEUED = auto()
    GRANTED = auto()
    """Holds a credit; its ingress has not shown it as leased yet."""
    LEASED = auto()
    PARKED = auto()
    """Holds nothing: just arrived, or its ingress is silent."""


QUEUED, GRANTED, LEASED, PARKED = State
"""The same, for where each request passes: Python 3.11 takes its time to look a member up."""


@dataclass(slots=True)
class Group:
    """What the requests that come from one call of a client have in common."""

    begun: bool = False
    """One of them was granted."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence as the router knows it. Compared and hashed by identity."""

    info: RequestInfo
    ingress: str
    expected: int
    """Output tokens it is likely to produce: orders the queue and sizes its KV room."""
    state: State = PARKED
    replica: str = ""
    """Where its credit is, while it holds one."""
    outstanding: int = 0
    """Expected output tokens not produced yet, while it holds a credit."""
    taken_up: bool = False
    """Some grant of it was seen as a lease: work may have been done."""
    since: float = 0.0
    """When it began to wait, or to hold its credit."""
    overtaken: int = 0
    """Grants given to others while it came first, for want of KV room or of a cached prompt."""
    reservation: Reservation | None = None
    """What its tenant's quota holds for it, once it was admitted."""
    gpu_s: float = 0.0
    """Its share of GPUs' time so far, in seconds."""
    deadline: float = inf
    """When it has waited for too long, by the router's clock."""
    group: Group | None = None
    """None of one that is alone."""

    @property
    def max_tokens(self) -> int:
        """Output that it may have: what was asked, or less where money is short."""
        return self.info.max_tokens if self.reservation is None else self.reservation.max_tokens

    @property
    def kv_need(self) -> int:
        """KV tokens that it is likely to fill."""
        return self.info.prompt_tokens + self.expected

"""A request while the router knows it, and what it holds at the moment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from router.messages import RequestInfo


class State(Enum):
    """What a request holds: a place in the queue, a credit, or nothing."""

    QUEUED = auto()
    GRANTED = auto()
    """Holds a credit; its ingress has not shown it as leased yet."""
    LEASED = auto()
    PARKED = auto()
    """Holds nothing: just arrived, or its ingress is silent."""


@dataclass(slots=True, eq=False)
class Request:
    """Compared and hashed by identity."""

    info: RequestInfo
    ingress: str
    expected: int
    """Output tokens it is likely to produce: orders the queue and sizes its KV room."""
    state: State = State.PARKED
    replica: str = ""
    """Where its credit is, while it holds one."""
    outstanding: int = 0
    """Expected output tokens not produced yet, while it holds a credit."""
    taken_up: bool = False
    """Some grant of it was seen as a lease: work may have been done."""
    since: float = 0.0
    """When it began to wait, or to hold its credit."""
    overtaken: int = 0
    """Grants given to others while it came first and no replica had KV room for it."""

    @property
    def kv_need(self) -> int:
        """KV tokens that it is likely to fill."""
        return self.info.prompt_tokens + self.expected

"""How many requests of one tenant run, in the pools of all models together.

It knows the tenant's queues, one per pool, but neither order nor replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class Queue(Protocol):
    """Of one tenant, in one pool."""

    eligible: bool
    """It takes part in the order."""

    @property
    def queued(self) -> int:
        """Requests that wait."""

    def activate(self) -> None:
        """Take part, if anything waits."""


@dataclass(slots=True, eq=False)
class Concurrency:
    """Counts one tenant's running requests. When the first place becomes free again, each of its
    queues becomes eligible."""

    limit: int = 0
    running: int = 0
    """More than the limit where that has fallen, or where work that runs became known late."""
    queues: list[Queue] = field(default_factory=list)

    @property
    def free(self) -> bool:
        return self.running < self.limit

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return sum(queue.queued for queue in self.queues)

    def resize(self, limit: int) -> None:
        was_free, self.limit = self.free, limit
        if not self.free:
            self.suspend()
        elif not was_free:
            self.activate()

    def activate(self) -> None:
        """A place has become free where there was none."""
        for queue in self.queues:
            queue.activate()

    def suspend(self) -> None:
        """All places are taken."""
        for queue in self.queues:
            queue.eligible = False

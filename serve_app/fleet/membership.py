"""Which processes of its own deployment Serve routes new work to.

A process hears of each change, and listens again where Serve has stopped to tell. The module does
not know what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from serve_app.ray_private import Members, num_replicas

ALONE = "Admission must be one process: take num_replicas and autoscaling_config from it"


def require_alone() -> None:
    """Raises ValueError if Serve may run other processes of the present deployment."""
    if num_replicas() not in (None, 1):
        raise ValueError(ALONE)


class Membership:
    """The members of the deployment to which this process belongs."""

    def __init__(self, on_change: Callable[[AbstractSet[str]], None]) -> None:
        """See `Members`."""
        self._on_change = on_change
        self._members = Members(on_change)

    def raise_if_dead(self) -> None:
        """Raises ValueError when there is no controller any more."""
        if not self._members.told:
            self._members = Members(self._on_change)

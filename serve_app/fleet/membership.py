"""Which processes of its own deployment Serve routes new work to.

Serve's controller tells every process that calls a deployment of each change; a process that wants
to know of itself asks for the same. This module knows how Serve tells; it does not know what
follows from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import ray
from ray import serve
from ray.serve._private.common import DeploymentTargetInfo
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve.exceptions import RayServeException

ALONE = "Admission must be one process: take num_replicas and autoscaling_config from it"


def require_alone() -> None:
    """Raises ValueError if Serve may run other processes of the present deployment."""
    try:
        config = serve.get_replica_context()._deployment_config
    except RayServeException:  # Serve does not run this at all.
        return
    scaling = config.autoscaling_config
    if (scaling.max_replicas if scaling is not None else config.num_replicas) != 1:
        raise ValueError(ALONE)


class Membership:
    """That of the deployment to which the present process belongs."""

    def __init__(self, on_change: Callable[[AbstractSet[str]], None]) -> None:
        """`on_change` is called on the present event loop, with the names of all members: soon, and
        after each change."""
        self._on_change = on_change
        self._listen()

    def check(self) -> None:
        """Listens again where Serve has stopped to tell, as it may when its controller dies. Raises
        ValueError when there is none any more."""
        if not self._client.is_running:
            self._listen()

    def _listen(self) -> None:
        context = serve.get_replica_context()
        targets = (LongPollNamespace.DEPLOYMENT_TARGETS, context.replica_id.deployment_id)
        self._client = LongPollClient(
            ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE),
            {targets: self._take},
            asyncio.get_running_loop(),
            client_id=f"membership of {context.replica_tag}",
        )

    def _take(self, targets: DeploymentTargetInfo) -> None:
        self._on_change({replica.replica_id.unique_id for replica in targets.running_replicas})

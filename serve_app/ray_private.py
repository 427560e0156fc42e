"""All that we use of Ray beyond its public interface, and what public way is missing.

Nothing else of ours names a private part of Ray. A release of Ray may move any of it, so
`pyproject.toml` has a ceiling, and tests/serve_app/test_ray_private.py says what has moved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private import worker
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION
from ray.experimental.internal_kv import (
    _internal_kv_get,
    _internal_kv_put,
    internal_kv_get_gcs_client,
)
from ray.serve._private.common import DeploymentID, DeploymentTargetInfo, ReplicaID
from ray.serve._private.constants import (
    RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S,
    RAY_SERVE_ENABLE_HA_PROXY,
    SERVE_CONTROLLER_NAME,
    SERVE_NAMESPACE,
)
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve.context import _get_global_client, _get_serve_request_context
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ServeDeploySchema

__all__ = ["DeploymentID", "ReplicaID"]
"""The keys of what a scaling policy is given: the interface is public, they are not."""

CALL_TIMEOUT_S = 10.0
STRAGGLERS_S = RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S if RAY_SERVE_ENABLE_HA_PROXY else 1.0
"""Seconds for which proxies may route to a replica that Serve has taken out. Serve tells nobody how
long that takes behind which proxy."""


def request_id() -> str:
    """What Serve's proxy calls the request that is served. Public is only the header that the
    client gets."""
    return str(_get_serve_request_context().request_id)


def logs_folder() -> Path:
    """Where Serve's processes write their logs on this node. No public function says it."""
    return Path(get_serve_logs_dir())


def num_replicas() -> int | None:
    """How many processes the present deployment may have; None outside of Serve. The public context
    of a replica does not show the configuration of its deployment."""
    try:
        config = serve.get_replica_context()._deployment_config
    except RayServeException:
        return None
    scaling = config.autoscaling_config
    return int(scaling.max_replicas if scaling is not None else config.num_replicas)


def unary(handle: DeploymentHandle) -> DeploymentHandle:
    """The same, with answers that come with the call's end and not through the object store, which
    takes milliseconds. The public options have nothing of the kind."""
    return handle.options(_by_reference=False)


def initialize(handle: DeploymentHandle) -> None:
    """Lets a handle be used where no event loop runs, which Serve takes for granted behind HAProxy:
    the public handle chooses for itself."""
    if not handle.is_initialized:
        handle._init(_run_router_in_separate_loop=True)


def deploy(config: ServeDeploySchema) -> None:
    """Applies a configuration as `serve deploy` does; `serve.run` takes code in its place."""
    _get_global_client().deploy_apps(config)


def instance_details() -> dict[str, Any]:
    """Where which replica and proxy runs, by `ServeInstanceDetails`. `serve.status` does not name
    nodes, and the dashboard, which does, may be off."""
    controller = _get_global_client()._controller
    call = controller.get_serve_instance_details.remote()
    details: dict[str, Any] = ray.get(call, timeout=CALL_TIMEOUT_S)
    return details


def drain_node(node: str, why: str, seconds: float) -> None:
    """Takes everything off a node within so many seconds. Ray's own command for it refuses where
    work runs. Raises RuntimeError if Ray refuses."""
    deadline_ms = int((time.time() + seconds) * 1000)
    # The reason under which Ray always agrees: a node that idles may be given work meanwhile.
    reason = DRAIN_NODE_REASON_PREEMPTION
    agreed, why_not = internal_kv_get_gcs_client().drain_node(node, reason, why, deadline_ms)
    if not agreed:
        raise RuntimeError(f"Ray does not drain node {node}: {why_not}")


def began_here() -> bool:
    """The cluster is this process's own. `ray.init` does not say whether it has found one."""
    return bool(worker._global_node.is_head())


def keep(key: str, value: bytes) -> None:
    """In Ray's own store, for all processes of the cluster. Serve's controller, where policies
    run, has no public place for what others read."""
    _internal_kv_put(key.encode(), value, overwrite=True)


def kept(key: str) -> bytes | None:
    """What `keep` has put there."""
    found: bytes | None = _internal_kv_get(key.encode())
    return found


class Members:
    """The processes of the present deployment that Serve routes new work to.

    Serve's controller tells every process that calls a deployment of each change. A process that
    wants to know of its own has no public way to ask.
    """

    def __init__(self, on_change: Callable[[AbstractSet[str]], None]) -> None:
        """`on_change` is called on the present event loop, with the names of all members: soon, and
        after each change. Raises ValueError where there is no controller."""
        self._on_change = on_change
        context = serve.get_replica_context()
        targets = (LongPollNamespace.DEPLOYMENT_TARGETS, context.replica_id.deployment_id)
        self._client = LongPollClient(
            ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE),
            {targets: self._take},
            asyncio.get_running_loop(),
            client_id=f"membership of {context.replica_tag}",
        )

    @property
    def told(self) -> bool:
        """False once Serve has stopped to tell, as it may when its controller dies."""
        return bool(self._client.is_running)

    def _take(self, targets: DeploymentTargetInfo) -> None:
        self._on_change({replica.replica_id.unique_id for replica in targets.running_replicas})

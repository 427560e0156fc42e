"""Has Serve take everything off a node of Ray's, and waits until it has: what a Kubernetes pod does
before it stops (`preStop`), since its SIGTERM reaches none of our processes.

    python -m serve_app.leave_node --seconds 200

Serve starts replacements on other nodes, then removes what is here, as after scaling down. The
module knows neither our deployments nor Kubernetes.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

import ray
from ray.core.generated import autoscaler_pb2
from ray.experimental import internal_kv
from ray.serve.context import _get_global_client

LOOK_PERIOD_S = 1.0
CALL_TIMEOUT_S = 10.0


def leave(node: str, seconds: float) -> None:
    """Returns once Serve runs nothing on the node, or so many seconds later. From `grace_s` before
    that on it no longer waits for replacements. Raises RuntimeError if Ray refuses."""
    until = time.monotonic() + seconds
    gcs = internal_kv.internal_kv_get_gcs_client()
    # The reason under which Ray always agrees: a node that idles may be given work meanwhile.
    reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
    deadline_ms = int((time.time() + seconds) * 1000)
    agreed, why_not = gcs.drain_node(node, reason, "its pod stops", deadline_ms)
    if not agreed:
        raise RuntimeError(f"Ray does not drain node {node}: {why_not}")
    while is_used(node, _details()) and time.monotonic() < until:
        time.sleep(LOOK_PERIOD_S)


def is_used(node: str, details: dict[str, Any]) -> bool:
    """Whether a replica of any deployment, or a proxy, runs on the node.

    details: what Serve tells of itself, by `ServeInstanceDetails`. A replica that only starts has
    no node yet.
    """
    replicas = (
        replica
        for application in details["applications"].values()
        for deployment in application["deployments"].values()
        for replica in deployment["replicas"]
    )
    return node in details["proxies"] or any(one.get("node_id") == node for one in replicas)


def _details() -> dict[str, Any]:
    controller = _get_global_client()._controller
    details: dict[str, Any] = ray.get(
        controller.get_serve_instance_details.remote(), timeout=CALL_TIMEOUT_S
    )
    return details


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m serve_app.leave_node", description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="at most so long")
    parser.add_argument("--node", help="its id; by default this one's")
    chosen = parser.parse_args()
    ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
    leave(chosen.node or ray.get_runtime_context().get_node_id(), chosen.seconds)


if __name__ == "__main__":
    main()

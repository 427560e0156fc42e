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

from serve_app import ray_private

LOOK_PERIOD_S = 1.0


def leave(node: str, seconds: float) -> None:
    """Returns once Serve runs nothing on the node, or so many seconds later. From `grace_s` before
    that on it no longer waits for replacements. Raises RuntimeError if Ray refuses."""
    until = time.monotonic() + seconds
    ray_private.drain_node(node, "its pod stops", seconds)
    while is_used(node, ray_private.instance_details()) and time.monotonic() < until:
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m serve_app.leave_node", description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="at most so long")
    parser.add_argument("--node", help="its id; by default this one's")
    chosen = parser.parse_args()
    ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
    leave(chosen.node or ray.get_runtime_context().get_node_id(), chosen.seconds)


if __name__ == "__main__":
    main()

"""Why there are as many replicas as there are: the log, metrics, and what `/admin/scaling` shows.

Decisions are made in Serve's controller and read in Admission, another process: the last ones lie
in the cluster's own key-value store, from which a restarted controller loses none.
"""

from __future__ import annotations

import json
import logging
import time
from math import inf
from typing import Any

from ray.serve import metrics

from serve_app import ray_private
from serve_app.scaling.types import Decision

logger = logging.getLogger("ray.serve")

KEPT = 50
"""Changes that are kept."""
QUIET_S = 30.0
"""A decision that changes nothing is told this often."""
GAUGES = {
    "demand": "Replicas' worth of work that arrives",
    "expected": "The same, by when a new replica would be up",
    "needed": "Replicas that the policy wants as soon as possible",
    "kept": "Replicas that were needed at most within the hold",
    "backlog_s": "GPU seconds of work that wait for a replica",
    "wait_s": "Seconds until what waits has a place",
    "missed": "Share of late answers that broke their SLO",
    "busy": "Mean share of time that replicas computed",
    "bubble": "Mean share of time that replicas idled with work",
    "starved": "Mean share of time that replicas idled with work at the router",
    "spare": "Mean share of time that nothing was to be done",
    "kv": "Mean share of KV blocks in use",
    "rows": "Mean share of rows in use",
    "reported": "Replicas whose signals are fresh",
}


class DecisionLog:
    """Lives in Serve's controller."""

    def __init__(self) -> None:
        tags = ("pool_application", "pool")
        self._gauges = {
            name: metrics.Gauge(f"fairstream_scaling_{name}", text, tag_keys=tags)
            for name, text in GAUGES.items()
        }
        self._desired = metrics.Gauge(
            "fairstream_scaling_replicas", "Replicas that the policy wants", tag_keys=tags
        )
        self._told_at: dict[tuple[str, str], float] = {}

    def add(self, application: str, deployment: str, decision: Decision) -> None:
        """Logged and kept if it changes something; told again now and then if not."""
        changes = decision.replicas != decision.numbers.target or decision.is_surprised
        now, pool = time.monotonic(), (application, deployment)
        if not changes and now - self._told_at.get(pool, -inf) < QUIET_S:
            return
        self._told_at[pool] = now
        told = decision.explain()
        logger.log(
            logging.INFO if changes else logging.DEBUG,
            "Scaling %s: %s. %s",
            deployment,
            decision.reason,
            json.dumps(told),
        )
        self._export(application, deployment, told)
        _keep(application, {"at": time.time(), "deployment": deployment} | told, changes)

    def _export(self, application: str, deployment: str, told: dict[str, Any]) -> None:
        tags = {"pool_application": application, "pool": deployment}
        self._desired.set(told["replicas"], tags=tags)
        for name, gauge in self._gauges.items():
            gauge.set(told[name], tags=tags)


def read_decisions(application: str) -> dict[str, Any]:
    """`now`: the last decision by deployment; `changes`: those that changed something, latest
    last."""
    data = ray_private.kept(_key(application))
    return json.loads(data) if data else {"now": {}, "changes": []}


def _keep(application: str, told: dict[str, Any], changes: bool) -> None:
    kept = read_decisions(application)
    kept["now"][told["deployment"]] = told
    if changes:
        kept["changes"] = [*kept["changes"], told][-KEPT:]
    ray_private.keep(_key(application), json.dumps(kept).encode())


def _key(application: str) -> str:
    return f"fairstream/scaling/{application}"

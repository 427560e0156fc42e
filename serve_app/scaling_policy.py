"""The scaling policy as Ray Serve calls it, in its controller, ten times a second.

It only carries: what replicas and Admission have recorded to `desired_replicas`, and the decision
back to Serve, to the log, to metrics and to `/admin/scaling`. An exception here would stop the
scaling of every application of the cluster, so none leaves it: the fleet then stays as it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ray.serve.config import AutoscalingContext

from serve_app.ray_private import DeploymentID, ReplicaID
from serve_app.scaling.decision import desired_replicas
from serve_app.scaling.log import DecisionLog
from serve_app.scaling.signals import backlog_of, load_of
from serve_app.scaling.types import Backlog, Decision, Load, ScalingState, Signals, read_limits

logger = logging.getLogger("ray.serve")

PERIOD_S = 1.0
STALE_S = 10.0
"""Numbers that are older were recorded by a process that hangs, or did not reach us."""
ADMISSION = "Admission"

Contexts: TypeAlias = Mapping[DeploymentID, AutoscalingContext]


@dataclass(slots=True)
class _Pool:
    """What is remembered of one deployment of replicas."""

    state: ScalingState = field(default_factory=ScalingState)
    replicas: int | None = None
    """How many the last decision wanted."""
    decided_at: float = float("-inf")


class ScalingPolicy:
    """Named in a configuration file as `autoscaling_policy`; `limits` are its `policy_kwargs`, the
    fields of `ScalingLimits` without the bounds, which Serve has. Raises ValueError for those that
    cannot work."""

    def __init__(self, **limits: float) -> None:
        self._limits = read_limits(limits)
        self._pools: dict[DeploymentID, _Pool] = {}
        self._log = DecisionLog()

    def __call__(
        self, contexts: Contexts
    ) -> tuple[dict[DeploymentID, int], dict[DeploymentID, dict[str, Any]]]:
        """The numbers of replicas by deployment; Serve keeps no state for us."""
        wanted = {}
        for name, context in contexts.items():
            try:
                wanted[name] = self._decide(name, context, contexts)
            except Exception:
                logger.exception("No decision about %s: it stays as it is", name)
                wanted[name] = context.target_num_replicas
        return wanted, {}

    def _decide(self, name: DeploymentID, context: AutoscalingContext, contexts: Contexts) -> int:
        target = int(context.target_num_replicas)
        if name.name == ADMISSION:
            return target
        now = time.monotonic()
        pool = self._pools.setdefault(name, _Pool())
        if now - pool.decided_at < PERIOD_S and pool.replicas == target:
            return target
        limits = replace(
            self._limits,
            min_replicas=context.capacity_adjusted_min_replicas,
            max_replicas=max(context.capacity_adjusted_max_replicas, 1),
        )
        decision = desired_replicas(_signals(now, context, contexts), limits, pool.state)
        if pool.replicas is not None and pool.replicas != target:
            # A call that waits at a handle starts a first replica, whatever the policy says.
            told = f"set from {pool.replicas} to {target} by Serve itself; {decision.reason}"
            decision = replace(decision, reason=told, is_surprised=True)
        pool.state, pool.decided_at, pool.replicas = decision.state, now, decision.replicas
        self._tell(name, decision)
        return decision.replicas

    def _tell(self, name: DeploymentID, decision: Decision) -> None:
        """What cannot be told is no reason not to act."""
        try:
            self._log.add(name.app_name, name.name, decision)
        except Exception:
            logger.exception("A decision about %s could not be told", name)


def _signals(now: float, context: AutoscalingContext, contexts: Contexts) -> Signals:
    admissions = (each for name, each in contexts.items() if name.name == ADMISSION)
    admission = next(admissions, None)
    return Signals(
        now=now,
        target=int(context.target_num_replicas),
        running=int(context.current_num_replicas),
        loads=tuple(_loads(context)),
        backlog=_backlog(admission, context) if admission is not None else None,
    )


def _loads(context: AutoscalingContext) -> list[Load]:
    recorded = _fresh(context).values()
    return [load for one in recorded if (load := load_of(one)) is not None]


def _backlog(admission: AutoscalingContext, context: AutoscalingContext) -> Backlog | None:
    """What Admission reports. While an old and a new Admission overlap, the newer one counts."""
    pool = context.deployment_name
    found = [backlog_of(one, pool) for one in _fresh(admission).values()]
    return next((backlog for backlog in reversed(found) if backlog is not None), None)


def _fresh(context: AutoscalingContext) -> dict[ReplicaID, dict[str, float]]:
    """Means by replica and name, of running replicas that have reported lately."""
    means: Mapping[str, Mapping[ReplicaID, float]] = context.aggregated_metrics or {}
    series: Mapping[str, Mapping[ReplicaID, Any]] = context.raw_metrics or {}
    found: dict[ReplicaID, dict[str, float]] = {}
    for name, by_replica in means.items():
        for replica, value in by_replica.items():
            points = series.get(name, {}).get(replica)
            if points and abs(time.time() - points[-1].timestamp) < STALE_S:
                found.setdefault(replica, {})[name] = float(value)
    return found

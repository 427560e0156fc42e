from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.utils import get_capacity_adjusted_num_replicas
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from router.workload import Workload
from serve_app import scaling_policy
from serve_app.scaling import log as scaling_log
from serve_app.scaling.signals import LOAD, record_workload
from serve_app.scaling_policy import ScalingPolicy

POOL, ADMISSION = DeploymentID("Replica", "app"), DeploymentID("Admission", "app")
IDLE = dict.fromkeys(LOAD, 0.0) | {"spare": 1.0}
FULL = dict.fromkeys(LOAD, 1.0) | {"spare": 0.0, "starved": 0.0, "bubble": 0.0}
NOTHING = record_workload({}, 0, 0)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = staticmethod(time.time)


class Told:
    """In place of the log: the cluster's store is not there."""

    def __init__(self) -> None:
        self.decisions: list[Any] = []

    def add(self, application: str, deployment: str, decision: Any) -> None:
        self.decisions.append(decision)


def log_of(policy: ScalingPolicy) -> Any:
    """Its `Told`."""
    return policy._log


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scaling_policy, "time", clock)
    monkeypatch.setattr(scaling_policy, "DecisionLog", Told)
    return clock


def context(
    name: DeploymentID,
    target: int,
    recorded: list[dict[str, float] | None],
    *,
    bounds: tuple[int, int] = (1, 10),
    capacity: float | None = None,
    age_s: float = 0.0,
    **broken: Any,
) -> AutoscalingContext:
    """As Serve builds it; a None in `recorded` is a replica that has not reported."""
    ids = [ReplicaID(str(index), name) for index in range(len(recorded))]
    at = time.time() - age_s
    means: dict[str, dict[ReplicaID, float]] = {}
    for replica, told in zip(ids, recorded, strict=True):
        for key, value in (told or {}).items():
            means.setdefault(key, {})[replica] = value
    series = {
        key: {
            replica: [SimpleNamespace(timestamp=at, value=value)] for replica, value in of.items()
        }
        for key, of in means.items()
    }
    least, most = (get_capacity_adjusted_num_replicas(bound, capacity) for bound in bounds)
    options: dict[str, Any] = {
        "deployment_id": name,
        "deployment_name": name.name,
        "app_name": name.app_name,
        "current_num_replicas": len(recorded),
        "target_num_replicas": target,
        "running_replicas": ids,
        "total_num_requests": 0.0,
        "total_queued_requests": 0.0,
        "aggregated_metrics": lambda: means,
        "raw_metrics": lambda: series,
        "capacity_adjusted_min_replicas": least,
        "capacity_adjusted_max_replicas": most,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": time.time(),
        "config": AutoscalingConfig(),
    }
    return AutoscalingContext(**(options | broken))


def contexts(
    target: int, recorded: list[dict[str, float] | None], admission: dict[str, float] | None = None,
    **options: Any,
) -> dict[DeploymentID, AutoscalingContext]:  # fmt: skip
    told = NOTHING if admission is None else admission
    return {
        POOL: context(POOL, target, recorded, **options),
        ADMISSION: context(ADMISSION, 1, [told or None], bounds=(1, 1)),
    }


def follow(policy: ScalingPolicy, clock: Clock, seconds: int, given: Any) -> int:
    """The first number that differs from the target within `seconds`; the target if none does."""
    target = given[POOL].target_num_replicas
    for _ in range(seconds):
        clock.now += 1.0
        wanted, _ = policy(given)
        if wanted[POOL] != target:
            return int(wanted[POOL])
    return int(target)


def test_full_replicas_are_joined_by_more_and_idle_ones_go(clock: Clock) -> None:
    policy = ScalingPolicy(hold_s=20)
    assert follow(policy, clock, 5, contexts(2, [FULL, FULL])) > 2
    policy = ScalingPolicy(hold_s=20)
    assert follow(policy, clock, 600, contexts(2, [IDLE, IDLE])) == 1
    assert log_of(policy).decisions[-1].reason.startswith("down from 2 to 1")


def test_admission_is_left_alone(clock: Clock) -> None:
    wanted, state = ScalingPolicy()(contexts(2, [FULL, FULL]))
    assert wanted[ADMISSION] == 1
    assert state == {}


@pytest.mark.parametrize(
    "given",
    [
        contexts(2, [IDLE, None]),
        contexts(2, [None, None]),
        contexts(2, [IDLE, {"busy": 0.0}]),
        contexts(2, [IDLE, IDLE], {}),
        contexts(2, [IDLE, IDLE], age_s=60.0),
        {POOL: context(POOL, 2, [IDLE, IDLE])},
    ],
    ids=["a silent one", "all silent", "half a report", "no Admission's", "stale", "no Admission"],
)
def test_with_metrics_missing_nothing_goes(clock: Clock, given: Any) -> None:
    assert follow(ScalingPolicy(hold_s=0, zero_hold_s=0), clock, 200, given) == 2


def test_from_none_a_waiting_request_wakes_one(clock: Clock) -> None:
    waiting = record_workload({"Replica-m": Workload(1, (0.0,))}, 0, 0)
    policy = ScalingPolicy(zero_hold_s=10)
    assert follow(policy, clock, 20, contexts(0, [], bounds=(0, 3))) == 0
    assert follow(policy, clock, 1, contexts(0, [], waiting, bounds=(0, 3))) == 1
    assert follow(policy, clock, 30, contexts(1, [IDLE], bounds=(0, 3))) == 0


@pytest.mark.parametrize("capacity", [None, 100])
def test_capacity_none_and_100_have_the_same_floor(clock: Clock, capacity: float | None) -> None:
    """R44: after an incremental upgrade of KubeRay's, it stays at 100."""
    given = contexts(1, [IDLE], bounds=(0, 3), capacity=capacity)
    assert follow(ScalingPolicy(hold_s=0, zero_hold_s=5), clock, 60, given) == 0


def test_it_decides_once_a_second(clock: Clock) -> None:
    policy = ScalingPolicy()
    for _ in range(50):
        clock.now += 0.1
        policy(contexts(1, [IDLE]))
    assert len(log_of(policy).decisions) <= 6


def test_nothing_is_raised_and_the_fleet_stays(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("metrics are on fire")

    given = contexts(3, [FULL] * 3, aggregated_metrics=broken)
    caplog.set_level(logging.ERROR, "ray.serve")
    logging.getLogger("ray.serve").addHandler(caplog.handler)
    wanted, _ = ScalingPolicy()(given)
    assert wanted == {POOL: 3, ADMISSION: 1}
    assert "it stays as it is" in caplog.text


def test_what_cannot_be_told_is_decided_all_the_same(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(self: Told, *told: object) -> None:
        raise ConnectionError("the store is away")

    monkeypatch.setattr(Told, "add", add)
    assert follow(ScalingPolicy(), clock, 5, contexts(2, [FULL, FULL])) > 2


def test_a_limit_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="wait is not a limit"):
        ScalingPolicy(wait=1)


def test_changes_are_kept_and_the_last_decision(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    stored: dict[str, bytes] = {}
    store = SimpleNamespace(
        kept=stored.get,
        keep=lambda key, value: stored.update({key: value}),
    )
    monkeypatch.setattr(scaling_log, "ray_private", store)
    policy = ScalingPolicy(hold_s=0, down_period_s=0)
    follow(policy, clock, 5, contexts(2, [FULL, FULL]))
    log = scaling_log.DecisionLog()
    for decision in log_of(policy).decisions:
        log.add("app", "Replica", decision)
    told = scaling_log.read_decisions("app")
    assert told["changes"]
    assert told["now"]["Replica"] == told["changes"][-1] | told["now"]["Replica"]
    assert told["changes"][-1]["replicas"] > told["changes"][-1]["target"] == 2
    assert scaling_log.read_decisions("another") == {"now": {}, "changes": []}

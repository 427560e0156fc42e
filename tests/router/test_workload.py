from __future__ import annotations

import pytest

from router.messages import Ending, LeaseInfo, Outcome, RequestInfo, Sync
from tests.router.desk import Desk

MODEL = "m"


def info(name: str, tenant: str = "a", output: int = 100) -> RequestInfo:
    return RequestInfo(name, tenant, prompt_tokens=10, max_tokens=output, model=MODEL)


def ended(desk: Desk, name: str, gpu_s: float, output: int = 100) -> None:
    """A request that ran and took so much."""
    request = info(name, output=output)
    desk.sync(request)
    desk.sync(leases=(LeaseInfo(request, "r", produced=output),))
    ending = Ending(
        request, Outcome.SUCCEEDED, output, first_token_s=9.0, last_token_s=9.0, gpu_s=gpu_s
    )
    desk.sync(endings=(ending,))


def test_what_waits_is_measured_by_what_such_requests_took() -> None:
    desk = Desk(slots=1, a={"max_concurrency": 8})
    ended(desk, "first", gpu_s=0.5)
    desk.sync(info("runs"), info("waits"), info("waits, and is short", output=10))
    workload = desk.router.workload()[MODEL]
    assert workload.waiting == 2
    assert workload.gpu_s == pytest.approx((0.55, 0, 0, 0))


def test_work_is_told_by_band() -> None:
    desk = Desk(a={"band": 0}, b={"band": 2})
    desk.sync(info("1"), info("2", "b"), info("3", "b"))
    before, _, after, _ = desk.router.workload()[MODEL].gpu_s
    assert after == pytest.approx(2 * before)


def test_what_its_own_tenant_holds_back_is_no_reason_for_a_replica() -> None:
    desk = Desk(slots=8, a={"max_concurrency": 2, "max_queued": 100})
    desk.sync(*(info(str(index)) for index in range(50)))
    assert desk.router.workload()[MODEL].waiting == 0
    asleep = Desk(a={"max_concurrency": 2, "max_queued": 100})
    asleep.sync(*(info(str(index)) for index in range(50)))
    assert asleep.router.workload()[MODEL].waiting == 2


def test_answers_that_broke_their_promise_are_counted() -> None:
    desk = Desk(slots=1, a={"slo": {"ttft_s": 1.0}})
    ended(desk, "late", gpu_s=0.1)
    assert desk.router.slo_counts() == (1, 1)


def test_requests_that_nobody_could_show_yet_wait_too_and_a_silent_ingress_has_none() -> None:
    desk = Desk()
    desk.router.sync(Sync("other", sequence=1, epoch=0, sleepers={MODEL: 2}))
    assert desk.router.workload()[MODEL].waiting == 2
    desk.clock.now += 3.0
    desk.router.expire()
    assert desk.router.workload()[MODEL].waiting == 0

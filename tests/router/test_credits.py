import pytest

from router.credits import Credits
from router.messages import ReplicaReport, RequestInfo
from router.request import Request
from tests.router.world import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock) -> Credits:
    return Credits(clock=clock, report_timeout_s=2.0)


def request_of(prompt: int = 10, expected: int = 10) -> Request:
    return Request(RequestInfo("x", "a", prompt, expected), "ingress", expected)


def test_the_least_loaded_replica_takes_the_next_request(pool):
    pool.report(ReplicaReport("small", slots=2, kv_tokens=1000))
    pool.report(ReplicaReport("large", slots=4, kv_tokens=1000))
    taken = []
    for _ in range(6):
        name = pool.find(20)
        pool.take(request_of(), name)
        taken.append(name)
    assert taken == ["small", "large", "large", "small", "large", "large"]
    assert pool.find(20) is None
    assert not pool.any_slot()


def test_a_replica_without_kv_room_is_not_chosen(pool):
    pool.report(ReplicaReport("full", slots=9, kv_tokens=100))
    pool.report(ReplicaReport("roomy", slots=2, kv_tokens=1000))
    pool.take(request_of(prompt=90, expected=5), "full")
    pool.take(request_of(), "roomy")
    assert pool.find(6) == "roomy"
    assert pool.find(5) == "full"
    assert pool.roomiest() == "roomy"


def test_an_empty_replica_takes_a_request_of_any_size(pool):
    pool.report(ReplicaReport("r", slots=2, kv_tokens=100))
    assert pool.find(10_000) == "r"
    pool.take(request_of(prompt=10_000), "r")
    assert pool.find(1) is None
    assert pool.any_slot()


def test_a_replica_can_be_excluded(pool):
    pool.report(ReplicaReport("r", slots=2, kv_tokens=100))
    assert pool.find(10, excluding="r") is None
    assert not pool.any_slot(excluding="r")


def test_a_credit_comes_back_once(pool):
    pool.report(ReplicaReport("r", slots=1, kv_tokens=100))
    request = request_of()
    pool.take(request, "r")
    pool.release(request)
    pool.release(request)
    replica = pool.replicas()["r"]
    assert (replica.leases, replica.kv_held, request.replica) == ({}, 0, "")


def test_silence_withdraws_credits_and_keeps_leases(pool, clock):
    pool.report(ReplicaReport("r", slots=2, kv_tokens=100))
    request = request_of()
    pool.take(request, "r")
    clock.now += 2.0
    assert pool.expire() == []
    assert pool.find(1) == "r"
    clock.now += 0.1
    assert [replica.name for replica in pool.expire()] == ["r"]
    assert pool.find(1) is None
    assert pool.roomiest() is None
    assert pool.expire() == []
    assert list(pool.replicas()["r"].leases) == [request]
    pool.report(ReplicaReport("r", slots=2, kv_tokens=100))
    assert pool.find(1) == "r"


def test_a_silent_replica_is_forgotten_once_its_leases_are_over(pool, clock):
    pool.report(ReplicaReport("r", slots=2, kv_tokens=100))
    request = request_of()
    pool.take(request, "r")
    clock.now += 3.0
    pool.expire()
    pool.release(request)
    pool.expire()
    assert not pool.replicas()


def test_a_draining_replica_takes_nothing(pool):
    """C56"""
    pool.report(ReplicaReport("r", slots=0, kv_tokens=100))
    assert pool.find(1) is None
    assert pool.roomiest() is None


def test_running_work_counts_where_no_slot_was_granted(pool):
    pool.take(request_of(), "unheard-of")
    pool.take(request_of(), "unheard-of")
    pool.report(ReplicaReport("unheard-of", slots=2, kv_tokens=1000))
    assert pool.find(1) is None

import pytest

from router.credits import Credits
from router.messages import ReplicaReport, RequestInfo
from router.policy import FairPolicy
from router.request import Request
from tests.router.world import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock) -> Credits:
    return Credits(FairPolicy(), clock=clock, report_timeout_s=2.0)


def request_of(prompt: int = 10, expected: int = 10) -> Request:
    return Request(RequestInfo("x", "a", prompt, expected), "ingress", expected)


def find(pool: Credits, kv_need: int, **options: object) -> str | None:
    replica = pool.find(request_of(kv_need - 1, 1), **options)
    return None if replica is None else replica.name


def test_the_least_loaded_replica_takes_the_next_request(pool):
    pool.report(ReplicaReport("small", slots=2, kv_tokens=1000))
    pool.report(ReplicaReport("large", slots=4, kv_tokens=1000))
    taken = []
    for _ in range(6):
        name = find(pool, 20)
        pool.take(request_of(), name)
        taken.append(name)
    assert taken == ["small", "large", "large", "small", "large", "large"]
    assert find(pool, 20) is None
    assert not pool.any_slot()


def test_a_replica_without_kv_room_is_not_chosen(pool):
    pool.report(ReplicaReport("full", slots=9, kv_tokens=100))
    pool.report(ReplicaReport("roomy", slots=2, kv_tokens=1000))
    pool.take(request_of(prompt=90, expected=5), "full")
    pool.take(request_of(), "roomy")
    assert find(pool, 6) == "roomy"
    assert find(pool, 5) == "full"
    assert pool.roomiest() == "roomy"


def test_an_empty_replica_takes_a_request_of_any_size(pool):
    pool.report(ReplicaReport("r", slots=2, kv_tokens=100))
    assert find(pool, 10_000) == "r"
    pool.take(request_of(prompt=10_000), "r")
    assert find(pool, 1) is None
    assert pool.any_slot()


def test_a_replica_can_be_excluded(pool):
    pool.report(ReplicaReport("r", slots=2, kv_tokens=100))
    assert find(pool, 10, excluding="r") is None
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
    assert find(pool, 1) == "r"
    clock.now += 0.1
    assert [replica.name for replica in pool.expire()] == ["r"]
    assert find(pool, 1) is None
    assert pool.roomiest() is None
    assert pool.expire() == []
    assert list(pool.replicas()["r"].leases) == [request]
    pool.report(ReplicaReport("r", slots=2, kv_tokens=100))
    assert find(pool, 1) == "r"


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
    assert find(pool, 1) is None
    assert pool.roomiest() is None


def test_running_work_counts_where_no_slot_was_granted(pool):
    pool.take(request_of(), "unheard-of")
    pool.take(request_of(), "unheard-of")
    pool.report(ReplicaReport("unheard-of", slots=2, kv_tokens=1000))
    assert find(pool, 1) is None


def test_rows_are_kept_for_newcomers_and_lookahead_is_not_spent_on_them(clock):
    """Lookahead lies behind all rows: work beyond the common rows would fill the kept ones."""
    pool = Credits(FairPolicy(reserve_rows=1), clock=clock)
    pool.report(ReplicaReport("r", slots=6, kv_tokens=1000, lookahead=2))
    for _ in range(3):
        pool.take(request_of(), find(pool, 20, newcomer=False))
    assert find(pool, 20, newcomer=False) is None
    assert not pool.any_slot(newcomer=False)
    for _ in range(3):
        pool.take(request_of(), find(pool, 20, newcomer=True))
    assert find(pool, 20, newcomer=True) is None


@pytest.mark.parametrize(
    ("reserve_rows", "rows", "kept"),
    [(None, 8, 0), (None, 16, 1), (None, 256, 16), (3, 8, 3), (9, 8, 7), (0, 256, 0), (5, 0, 0)],
)
def test_one_row_in_sixteen_is_kept_unless_told_otherwise(reserve_rows, rows, kept):
    assert FairPolicy(reserve_rows=reserve_rows).reserved(rows) == kept


PREFIXES = (11, 22, 33)
"""Of the first 64, 128 and 256 tokens."""


def prefixed(prefixes: tuple[int, ...]) -> Request:
    return Request(RequestInfo("x", "a", 300, 10, prefixes=prefixes), "ingress", 10)


def two_replicas(clock: Clock) -> Credits:
    pool = Credits(FairPolicy(), clock=clock)
    pool.report(ReplicaReport("a", slots=3, kv_tokens=10_000))
    pool.report(ReplicaReport("b", slots=9, kv_tokens=10_000))
    return pool


def test_a_cached_prefix_draws_a_request_until_its_replica_is_full(clock):
    """C47: a hot prefix spills to the other replica at the bound: the slots of its own."""
    pool = two_replicas(clock)
    pool.take(prefixed(PREFIXES), "a")
    taken = []
    for _ in range(4):
        request = prefixed((*PREFIXES[:2], 99))
        replica = pool.find(request)
        pool.take(request, replica.name)
        taken.append(replica.name)
    assert taken == ["a", "a", "b", "b"]


def test_a_prompt_that_nobody_has_goes_where_there_is_least_to_do(clock):
    """C47: not to the replica with the smallest cache."""
    pool = two_replicas(clock)
    pool.take(prefixed(()), "a")
    for number in range(6):
        pool.take(prefixed((number,)), "b")
        pool.release(next(iter(pool.replicas()["b"].leases)))
    assert pool.find(prefixed((100, 200))).name == "b"

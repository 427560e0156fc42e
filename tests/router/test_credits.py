import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.credits import Credits, Replica
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


def defined_place(
    pool: Credits, request: Request, excluding: str | None, newcomer: bool
) -> Replica | None:
    """What `find` is to find, in as many words."""

    def fits(replica: Replica) -> bool:
        slots = replica.slots if newcomer else replica.common_slots
        room = replica.kv_free + replica.prefixes.match(request.info.prefixes)
        has_room = not replica.leases or request.kv_need <= room
        return replica.name != excluding and len(replica.leases) < slots and has_room

    def rank(replica: Replica) -> tuple[float, ...]:
        load = len(replica.leases) / replica.slots
        return (-replica.prefixes.match(request.info.prefixes), load, replica.bit)

    return min(filter(fits, pool.replicas().values()), key=rank, default=None)


NAMES = st.sampled_from("abcd")
CHAINS = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)).map(
    lambda chain: (*(100 * chain[0] + depth for depth in range(chain[1])), chain[2])
)
"""Prompts that share beginnings, and one prefix that stands at several depths."""
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("report"), NAMES, st.integers(0, 4), st.sampled_from([200, 600, 5000])),
        st.tuples(st.just("take"), CHAINS, st.integers(1, 400), st.booleans()),
        st.tuples(st.just("adopt"), CHAINS, st.integers(1, 400), NAMES),
        st.tuples(st.just("release"), st.integers(0, 20)),
        st.tuples(st.just("silence")),
    ),
    max_size=40,
)


@given(EVENTS, st.sampled_from([None, "a"]), CHAINS, st.sampled_from([0, 1]))
def test_a_request_goes_where_the_definition_says(events, excluding, chain, reserve_rows):
    clock = Clock()
    pool = Credits(FairPolicy(reserve_rows=reserve_rows), clock=clock, report_timeout_s=2.0)
    taken: list[Request] = []
    for kind, *details in events:
        clock.now += 0.1
        if kind == "report":
            pool.report(ReplicaReport(*details))
        elif kind == "silence":
            clock.now += 1.5
            pool.expire()
        elif kind == "release":
            if taken:
                pool.release(taken.pop(details[0] % len(taken)))
        else:
            prefixes, prompt, how = details
            request = Request(RequestInfo("x", "t", prompt, 10, prefixes=prefixes), "ingress", 10)
            if kind == "take":
                place = pool.find(request, excluding, newcomer=how)
                assert place is defined_place(pool, request, excluding, how)
                how = None if place is None else place.name
            if how is not None:
                pool.take(request, how)
                taken.append(request)
        probe = Request(RequestInfo("x", "t", 300, 10, prefixes=chain), "ingress", 10)
        for newcomer in (False, True):
            place = defined_place(pool, probe, excluding, newcomer)
            assert pool.find(probe, excluding, newcomer=newcomer) is place
            cached = 0 if place is None else place.prefixes.match(chain)
            for beyond in (0, 64, 128, 256):
                expected = place if cached > beyond else None
                found = pool.find(probe, excluding, newcomer=newcomer, beyond=beyond)
                assert found is expected
            slots = [
                replica
                for replica in pool.replicas().values()
                if len(replica.leases) < (replica.slots if newcomer else replica.common_slots)
            ]
            assert pool.any_slot(newcomer=newcomer) == bool(slots)


def test_a_replica_that_is_forgotten_leaves_no_prefix_behind(pool, clock):
    pool.report(ReplicaReport("r", slots=2, kv_tokens=10_000))
    request = prefixed(PREFIXES)
    pool.take(request, "r")
    pool.release(request)
    clock.now += 3.0
    pool.expire()
    pool.report(ReplicaReport("new", slots=2, kv_tokens=10_000))
    assert len(pool._prefixes) == 0
    assert pool.find(request, beyond=0) is None
    assert pool.find(request).name == "new"

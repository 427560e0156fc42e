"""The order among one tenant's own requests: by priority, then as they came."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import FairPolicy
from tests.router.desk import Desk, ids, info
from tests.router.test_fair_queue import dispatch, dispatch_all, queue_of, request_of

WAY = st.lists(
    st.tuples(
        st.sampled_from(["push", "front", "start", "remove"]), st.integers(-2, 2), st.integers(0)
    ),
    max_size=60,
)


@given(WAY)
def test_a_queue_is_sorted_by_priority_and_stable(way):
    """Against a plain list, whatever comes and goes."""
    queue = queue_of(a=1)
    tenant, wanted = queue.tenant("a"), []
    for act, priority, choice in way:
        if act in ("push", "front"):
            request = request_of("a", priority=priority)
            queue.push(request, front=act == "front")
            wanted.insert(0 if act == "front" else len(wanted), request)
            wanted.sort(key=lambda each: each.info.priority)
        elif act == "start" and wanted:
            assert tenant.head is wanted[0]
            queue.start(wanted.pop(0))
        elif act == "remove" and wanted:
            queue.remove(wanted.pop(choice % len(wanted)))
        assert tenant.queued == queue.waiting == len(wanted)
        assert set(tenant.lines()) == set(wanted)
        assert tenant.eligible == bool(wanted)
        assert not wanted or tenant.head is wanted[0]


def test_a_priority_counts_among_the_tenants_own_requests_only():
    """However urgent a's requests are to a, b has its turn."""
    queue = queue_of(a=1, b=1)
    for priority in (0, 5, -5, 0):
        queue.push(request_of("a", f"a{priority}", priority))
    for priority in (900, 800):
        queue.push(request_of("b", f"b{priority}", priority))
    assert dispatch_all(queue) == ["a-5", "b800", "a0", "b900", "a0", "a5"]


def test_what_runs_is_not_touched_by_what_is_more_urgent():
    queue = queue_of(a=1)
    queue.push(request_of("a", "first", 5))
    assert dispatch(queue) == "first"
    queue.push(request_of("a", "urgent", -5))
    assert [each.info.request_id for each in queue.tenant("a").running] == ["first"]


@pytest.mark.parametrize("prefixes", [(), (7,)])
def test_the_router_grants_the_most_urgent_first(prefixes):
    """A cached prefix of a less urgent one changes nothing."""
    desk = Desk(slots=1, policy=FairPolicy(burst=0.0))
    first = info("first", prefixes=prefixes)
    assert ids(desk.sync(first)) == ["first"]
    late, soon = info("late", priority=3, prefixes=prefixes), info("soon", priority=-3)
    usual = info("usual")
    desk.sync(first, late, usual, soon)
    order, waiting = [], [late, usual, soon]
    while waiting:
        granted = ids(desk.sync(*waiting))
        order += granted
        waiting = [each for each in waiting if each.request_id not in granted]
    assert order == ["soon", "usual", "late"]


def test_priorities_do_not_help_where_the_queue_is_full():
    desk = Desk(a={"max_queued": 2})
    waiting = [info("x", priority=9), info("y", priority=9)]
    reply = desk.sync(*waiting, info("urgent", priority=-9))
    assert [refusal.request_id for refusal in reply.refusals] == ["urgent"]
    assert desk.queued() == 2

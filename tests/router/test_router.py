"""The conversation, case by case; test_router_world.py holds what must be true in all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ledger import Usage
from router.messages import (
    Grant,
    LeaseInfo,
    Outcome,
    Refusal,
    Sync,
)
from router.router import Router
from router.snapshot import Snapshot
from tests.router.desk import EPOCH, Desk, ending, ids, info, infos, refused
from tests.router.world import World, assert_drained, tenants_of


def test_a_grant_is_repeated_until_the_request_shows_as_a_lease():
    desk = Desk(slots=1)
    for _ in range(3):
        assert desk.sync(info()).grants == (Grant("x", 0, "r", 50),)
    assert desk.sync(leases=(LeaseInfo(info(), "r"),)).grants == ()
    assert desk.running() == 1


def test_an_ending_is_acknowledged_every_time_and_booked_once():
    desk = Desk(slots=1)
    desk.sync(info())
    desk.sync(leases=(LeaseInfo(info(), "r", produced=3, cached=10),))
    for _ in range(3):
        assert desk.sync(endings=(ending(info()),)).settled == ("x",)
    assert desk.sync().settled == ()
    assert desk.outcomes() == {Outcome.SUCCEEDED: 1}
    usage = desk.snapshot().usage["a"]
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (100, 10, 5)
    assert_drained(desk.router)


def test_a_request_that_is_in_no_set_any_more_is_cancelled():
    desk = Desk(slots=2)
    queued, granted, leased = info("queued", "b"), info("granted"), info("leased")
    desk.router.update_tenants(tenants_of(a={}, b={"max_concurrency": 1}))
    desk.sync(info("other", "b"), ingress="j")
    desk.sync(leased)
    desk.sync(granted, queued, leases=(LeaseInfo(leased, "r"),))
    desk.sync()
    assert desk.outcomes("a") == {Outcome.CANCELLED: 2}
    assert desk.outcomes("b") == {Outcome.CANCELLED: 1}
    assert desk.running("a") == desk.queued("b") == 0


def test_an_older_sync_changes_nothing_and_hears_the_present_state():
    desk = Desk(slots=1)
    old = Sync("i", 1, EPOCH, waiting=(info("old"),))
    desk.sequence = 1
    desk.sync(info("new"))
    assert desk.router.sync(old).grants == (Grant("new", 0, "r", 50),)
    assert desk.snapshot().ingresses == {"i": 1}


def test_changes_since_what_was_never_heard_change_nothing():
    """It is to be shown everything: by a router that has forgotten it, or is another."""
    desk = Desk(slots=1)
    desk.sync(*infos(3))
    known = desk.snapshot()
    seen = desk.sequence
    for epoch, base in ((EPOCH, seen + 1), (EPOCH - 1, seen), (EPOCH + 1, seen)):
        reply = desk.router.sync(Sync("i", seen + 2, epoch, gone=("a0",), base=base))
        assert reply.lost
        assert desk.snapshot() == known
    assert desk.router.sync(Sync("j", 2, EPOCH, base=1)).lost
    assert not desk.router.sync(Sync("i", seen + 2, EPOCH, gone=("a1",), base=seen)).lost
    assert desk.snapshot().ingresses == {"i": 2}


def test_a_repeated_sync_changes_nothing():
    desk = Desk(slots=2, a={"max_queued": 1})
    desk.sync(info("x"), info("y"))
    waiting = (info("y"), *infos(3))
    sync = Sync("i", 2, EPOCH, waiting, (LeaseInfo(info("z"), "r", 4),), (ending(info("x")),))
    first = desk.router.sync(sync)
    assert refused(first) == ["a1", "a2"]
    state = desk.snapshot()
    assert desk.router.sync(sync) == first
    assert desk.snapshot() == state


def test_a_request_shown_as_ended_has_ended_wherever_else_it_is_shown():
    desk = Desk(slots=1)
    desk.sync(info())
    lease = LeaseInfo(info(), "r", produced=5, cached=0)
    for _ in range(2):
        reply = desk.sync(info(), leases=(lease,), endings=(ending(info()),))
        assert (reply.grants, reply.settled) == ((), ("x",))
    assert desk.outcomes() == {Outcome.SUCCEEDED: 1}
    assert_drained(desk.router)


def test_a_lease_shown_as_waiting_again_is_granted_again():
    desk = Desk(slots=1)
    desk.sync(info())
    desk.sync(leases=(LeaseInfo(info(), "r"),))
    assert desk.sync(info()).grants == (Grant("x", 0, "r", 50),)


def test_a_cancelled_lease_is_charged_for_its_prompt_and_an_untouched_grant_is_not():
    """C50"""
    desk = Desk(slots=2)
    desk.sync(info("leased"), info("granted"))
    desk.sync(info("granted"), leases=(LeaseInfo(info("leased"), "r"),))
    assert desk.snapshot().usage["a"].prompt_tokens == 200
    desk.sync()
    assert desk.snapshot().usage["a"].prompt_tokens == 100
    assert desk.snapshot().tenants["a"].virtual_times["m"] == 100.0


def test_a_request_that_starts_again_goes_first_and_is_not_charged_twice():
    desk = Desk(slots=1)
    first, second, third = info("1"), info("2"), info("3")
    desk.sync(first)
    desk.sync(second, third, leases=(LeaseInfo(first, "r"),))
    charged = desk.snapshot().tenants["a"].virtual_times["m"]
    reply = desk.sync(second, third, info("1", attempt=1))
    assert reply.grants == (Grant("1", 1, "r", 50),)
    assert desk.snapshot().tenants["a"].virtual_times["m"] == charged
    assert (desk.running(), desk.queued()) == (1, 2)
    assert desk.snapshot().usage["a"].prompt_tokens == 100


def test_a_grant_of_an_earlier_attempt_frees_its_credit():
    desk = Desk(slots=1)
    desk.sync(info())
    desk.report(slots=0)
    assert desk.sync(info(attempt=1)).grants == ()
    assert (desk.running(), desk.queued()) == (0, 1)
    assert desk.snapshot().replicas["r"].leases == 0


def test_progress_is_charged_once_and_never_goes_back():
    desk = Desk(slots=1)
    desk.sync(info())
    for produced in (3, 3, 9, 4):
        desk.sync(leases=(LeaseInfo(info(), "r", produced, cached=0),))
    assert desk.snapshot().usage["a"].output_tokens == 9
    assert desk.snapshot().tenants["a"].virtual_times["m"] == 100 + 2 * 9


def test_what_a_tenant_was_served_does_not_rise_when_its_counter_is_lifted():
    desk = Desk(slots=1, a={"weight": 4.0, "burst": 0.0}, b={})
    for name in ("1", "2", "3"):
        desk.sync(info(name, "b"))
        desk.sync(leases=(LeaseInfo(info(name, "b"), "r", 9, cached=0),))
        desk.sync()
    desk.sync(info("late"))
    tenants = desk.snapshot().tenants
    assert tenants["a"].virtual_times["m"] > 200
    assert tenants["a"].service == {"m": 100.0}
    assert tenants["b"].service == {"m": 3 * (100 + 2 * 9)}
    assert (tenants["a"].weight, tenants["b"].weight) == (4.0, 1.0)


def test_a_tenant_over_its_concurrency_waits():
    desk = Desk(slots=9, a={"max_concurrency": 2})
    a, b, c = infos(3)
    assert ids(desk.sync(a, b, c)) == ["a0", "a1"]
    assert ids(desk.sync(c, leases=(LeaseInfo(a, "r"), LeaseInfo(b, "r")))) == []
    assert ids(desk.sync(c, leases=(LeaseInfo(b, "r"),), endings=(ending(a),))) == ["a2"]


def test_beyond_its_queue_a_tenant_is_refused_and_only_then():
    desk = Desk(slots=3, a={"max_concurrency": 2, "max_queued": 3})
    reply = desk.sync(*infos(7))
    assert ids(reply) == ["a0", "a1"]
    assert refused(reply) == ["a5", "a6"]
    assert "at most 3 requests may wait" in reply.refusals[0].reason


def test_without_a_queue_what_can_start_at_once_is_still_accepted():
    """C52: concurrency 1, no queue: A runs, B is refused, A ends, C is accepted."""
    desk = Desk(slots=9, a={"max_concurrency": 1, "max_queued": 0})
    a, b, c = infos(3)
    assert ids(desk.sync(a)) == ["a0"]
    assert refused(desk.sync(b, leases=(LeaseInfo(a, "r"),))) == ["a1"]
    assert ids(desk.sync(c, endings=(ending(a),))) == ["a2"]


def test_a_refused_request_may_be_accepted_when_it_asks_again():
    desk = Desk(slots=1, a={"max_concurrency": 1, "max_queued": 0})
    a, b = infos(2)
    desk.sync(a)
    assert refused(desk.sync(a, b)) == ["a1"]
    assert ids(desk.sync(b, endings=(ending(a),))) == ["a1"]


def test_retry_after_is_whole_seconds_at_the_recent_pace_of_the_tenant():
    """R40"""
    desk = Desk(slots=1, a={"max_queued": 0}, idle={"max_queued": 0})
    first, *rest = infos(30)
    desk.sync(first)
    desk.clock.now += 2.5
    desk.sync(leases=(LeaseInfo(first, "r"),))
    reply = desk.sync(rest[0], endings=(ending(first),))
    assert ids(reply) == ["a1"]
    reply = desk.sync(rest[0], *rest[1:])
    waits = [refusal.retry_after_s for refusal in reply.refusals]
    assert waits[:4] == [3, 5, 8, 10]
    assert waits[-1] == 60
    assert desk.sync(rest[0], info("z", "idle")).refusals[0].retry_after_s == 3


def test_retry_after_is_at_least_a_second_when_nothing_is_known():
    """R40"""
    desk = Desk(slots=0, a={"max_queued": 0})
    assert desk.sync(info()).refusals[0].retry_after_s == 1


def test_a_request_of_an_unknown_tenant_is_refused():
    desk = Desk(slots=1)
    before = desk.sync() and desk.snapshot()
    reply = desk.sync(info(tenant="nobody"))
    assert reply.refusals == (Refusal("x", "unknown tenant", 1),)
    assert desk.snapshot() == before


def test_what_waits_of_a_tenant_that_is_gone_is_refused_and_what_runs_goes_on():
    desk = Desk(slots=1)
    a, b = infos(2)
    desk.sync(a, b)
    desk.router.update_tenants(tenants_of(other={}))
    reply = desk.sync(b, leases=(LeaseInfo(a, "r", 1),))
    assert refused(reply) == ["a1"]
    desk.sync(endings=(ending(a),))
    assert desk.outcomes() == {Outcome.SUCCEEDED: 1}
    assert_drained(desk.router)
    desk.router.update_tenants(tenants_of(other={}))
    assert list(desk.snapshot().tenants) == ["other"]


def test_more_concurrency_takes_effect_at_once_and_wakes_the_ingress():
    desk = Desk(slots=2, a={"max_concurrency": 1})
    desk.sync(*infos(2))
    desk.router.update_tenants(tenants_of(a={"max_concurrency": 2}))
    assert desk.router.take_news() == {"i"}
    assert desk.running() == 2


def test_news_names_ingresses_with_grants_that_no_reply_has_carried():
    desk = Desk(slots=1)
    desk.sync(info("x"), ingress="i")
    desk.sync(info("y"), ingress="j")
    assert desk.router.take_news() == set()
    desk.sync(ingress="i", endings=(ending(info("x")),))
    assert desk.router.take_news() == {"j"}
    assert desk.router.take_news() == set()
    desk.sync(info("z"), ingress="i")
    desk.report(slots=2)
    assert desk.router.take_news() == {"i"}


def test_a_silent_ingress_loses_its_places_and_credits_but_not_its_requests():
    desk = Desk(slots=1)
    a, b = infos(2)
    desk.sync(a, b)
    desk.sync(b, leases=(LeaseInfo(a, "r", 2),))
    desk.clock.now += 1.5
    desk.report(slots=1)
    desk.clock.now += 0.6
    desk.router.expire()
    assert (desk.running(), desk.queued()) == (0, 0)
    assert desk.sync(info("other", "a"), ingress="j").grants
    reply = desk.sync(b, leases=(LeaseInfo(a, "r", 4),))
    assert (reply.grants, reply.refusals) == ((), ())
    assert (desk.running(), desk.queued()) == (2, 1)
    desk.sync(endings=(ending(a), ending(b, Outcome.CANCELLED, produced=0)))
    assert desk.outcomes() == {Outcome.SUCCEEDED: 1, Outcome.CANCELLED: 1}
    assert desk.snapshot().usage["a"].output_tokens == 5


def test_requests_of_a_dead_ingress_have_failed():
    desk = Desk(slots=1)
    desk.sync(*infos(2))
    desk.clock.now += 61.0
    desk.router.expire()
    assert desk.outcomes() == {Outcome.FAILED: 2}
    assert desk.snapshot().ingresses == {}
    assert_drained(desk.router)


def test_a_grant_on_a_replica_that_fell_silent_goes_to_another():
    desk = Desk(slots=1)
    assert desk.sync(info()).grants == (Grant("x", 0, "r", 50),)
    desk.clock.now += 1.9
    desk.report(slots=1, replica="other")
    desk.sync(info())
    desk.clock.now += 0.2
    desk.router.expire()
    assert desk.router.take_news() == {"i"}
    assert desk.sync(info()).grants == (Grant("x", 0, "other", 50),)
    assert desk.snapshot().usage["a"].prompt_tokens == 100


def test_a_lease_on_a_silent_replica_stays():
    desk = Desk(slots=1)
    desk.sync(info())
    lease = LeaseInfo(info(), "r", 1)
    for _ in range(3):
        desk.clock.now += 1.5
        desk.sync(leases=(lease,))
        desk.router.expire()
    assert desk.running() == 1
    assert desk.snapshot().replicas["r"].slots == 0


def test_a_lease_taken_up_from_a_grant_withdrawn_meanwhile_is_a_fact():
    desk = Desk(slots=1)
    desk.sync(info())
    desk.clock.now += 1.9
    desk.report(slots=1, replica="other")
    desk.sync(info())
    desk.clock.now += 0.2
    desk.router.expire()
    desk.sync(leases=(LeaseInfo(info(), "r", 1),))
    leases = {name: replica.leases for name, replica in desk.snapshot().replicas.items()}
    assert leases == {"r": 1, "other": 0}
    desk.sync(endings=(ending(info()),))
    assert_drained(desk.router)


def test_replies_tell_the_counters_of_tenants_that_the_ingress_has():
    desk = Desk(slots=3, a={}, b={}, c={})
    assert set(desk.sync(info("x", "a"), info("y", "b")).virtual_times["m"]) == {"a", "b"}
    reply = desk.sync(info("x", "a"), endings=(ending(info("y", "b"), produced=3),))
    assert reply.virtual_times["m"] == {"a": 100.0, "b": 106.0}
    assert set(desk.sync(info("x", "a")).virtual_times["m"]) == {"a"}


def test_an_epoch_below_one_is_refused():
    with pytest.raises(ValueError, match="epoch"):
        Router(tenants_of(a={}), epoch=0)


TRAFFIC = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.booleans(), st.integers(0, 2)),
    min_size=1,
    max_size=25,
)


def without_refusals(world: World) -> Snapshot:
    """What a router knows, but for the number of refusals."""
    snapshot = world.router.snapshot()
    for usage in snapshot.usage.values():
        usage.refused = 0
    used = {name: usage for name, usage in snapshot.usage.items() if usage != Usage()}
    return replace(snapshot, usage=used)


@given(TRAFFIC)
def test_a_refusal_leaves_no_trace(traffic):
    """C49, C52: a router that never saw the refused requests is in the same state."""
    limits = {"a": {"max_concurrency": 1, "max_queued": 0}, "b": {"max_queued": 2}}
    world = World(tenants_of(**limits))
    world.add_replica(slots=2)
    ingress = world.add_ingress()
    twin = World(tenants_of(**limits))
    twin.add_replica(slots=2)
    for tenant, count, cancels, steps in traffic:
        for _ in range(count):
            world.submit(ingress, tenant)
        if cancels and ingress.leases:
            world.cancel(ingress, next(iter(ingress.leases)))
        sync = ingress.next_sync()
        reply = world.deliver(sync)
        gone = set(refused(reply))
        kept = tuple(each for each in sync.waiting if each.request_id not in gone)
        twin_reply = twin.deliver(replace(sync, waiting=kept))
        assert twin_reply == replace(reply, refusals=(), rate_limits=twin_reply.rate_limits)
        assert without_refusals(twin) == without_refusals(world)
        world.hear(ingress, reply)
        for _ in range(steps):
            world.step()

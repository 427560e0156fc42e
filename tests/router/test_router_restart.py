"""A router that starts again, and learns everything from what ingresses show it."""

from __future__ import annotations

from dataclasses import replace

from router.messages import LeaseInfo, Outcome, RateLimit, RateLimits
from tests.router.desk import EPOCH, Desk, ending, ids, info, infos, refused


def test_nothing_is_granted_during_the_grace():
    desk = Desk(slots=1, grace_s=0.5)
    assert desk.sync(info()).grants == ()
    desk.clock.now += 0.4
    desk.router.expire()
    assert desk.router.take_news() == set()
    desk.clock.now += 0.2
    desk.router.expire()
    assert desk.router.take_news() == {"i"}
    assert ids(desk.sync(info())) == ["x"]


def test_without_a_queue_a_request_is_refused_during_the_grace():
    desk = Desk(slots=1, grace_s=0.5, a={"max_queued": 0})
    assert refused(desk.sync(info())) == ["x"]


def test_a_restarted_router_learns_leases_and_counters_and_charges_neither_again():
    desk = Desk(slots=2, grace_s=0.5, a={}, b={})
    lease = LeaseInfo(info("x"), "r", produced=8, cached=50)
    reply = desk.sync(
        info("y"), leases=(lease,), epoch=3, virtual_times={"m": {"a": 500.0, "b": 480.0}}
    )
    assert reply.epoch == EPOCH
    assert reply.virtual_times == {"m": {"a": 500.0}}
    assert desk.running("a") == 1
    assert desk.snapshot().virtual_times["m"] == 480.0
    assert desk.snapshot().usage["a"].output_tokens == 0
    desk.sync(info("y"), leases=(replace(lease, produced=10),))
    assert desk.snapshot().tenants["a"].virtual_times["m"] == 500.0 + 2 * 2
    desk.clock.now += 0.6
    assert ids(desk.sync(info("y"), leases=(lease,))) == ["y"]


def test_a_restarted_router_refuses_nothing_that_was_waiting():
    desk = Desk(slots=1, grace_s=0.5, a={"max_queued": 1})
    reply = desk.sync(*infos(3), admitted=3, epoch=3)
    assert (reply.refusals, desk.queued()) == ((), 3)
    assert refused(desk.sync(*infos(3), info("new"))) == ["new"]


def test_a_restarted_router_books_endings_that_nobody_acknowledged():
    desk = Desk(slots=1)
    reply = desk.sync(endings=(ending(info(), produced=9),), epoch=3)
    assert reply.settled == ("x",)
    assert desk.outcomes() == {Outcome.SUCCEEDED: 1}
    assert desk.snapshot().usage["a"].output_tokens == 0


def test_work_that_an_ingress_started_by_itself_is_charged_in_full():
    """While the router is away an ingress may reuse credits for what it already holds."""
    desk = Desk(slots=1)
    own = LeaseInfo(info("own"), "r", produced=4, cached=0)
    desk.sync(leases=(own,))
    assert desk.snapshot().tenants["a"].virtual_times["m"] == 100 + 2 * 4
    assert ids(desk.sync(info("x"), leases=(own,))) == []
    desk.sync(info("x"), endings=(ending(info("unheard-of"), produced=1),))
    usage = desk.snapshot().usage["a"]
    assert (usage.prompt_tokens, usage.output_tokens) == (300, 5)


LIMITED = {"requests_per_minute": 60, "tokens_per_minute": 6_000}
TOLD = RateLimits(RateLimit(60, 20, reset_s=40.0), RateLimit(6_000, 2_000, reset_s=40.0))
"""Of the last minute 40 requests and 4,000 tokens are used, what runs included."""


def left(desk: Desk) -> tuple[int, int]:
    rates = desk.sync(info("asks")).rate_limits["a"]
    assert rates.requests is not None
    assert rates.tokens is not None
    return rates.requests.remaining, rates.tokens.remaining


def test_a_restarted_router_forgives_nothing_of_the_last_minute():
    """And does not count again what runs: its lease is in what was told. It ends with 42 of the
    150 tokens held for it unused."""
    desk = Desk(slots=2, a=LIMITED)
    lease = LeaseInfo(info("x"), "r", produced=8)
    desk.sync(leases=(lease,), epoch=3, rates={"a": TOLD})
    assert left(desk) == (19, 2_000 - 150 + 42)


def test_a_restarted_router_refuses_for_no_rate_what_was_admitted():
    """What waits holds its units already: it is in what was told. What came since is new."""
    used_up = RateLimits(RateLimit(60, 0, reset_s=60.0), RateLimit(6_000, 0, reset_s=60.0))
    desk = Desk(slots=1, a=LIMITED)
    waiting = [info("x"), info("y"), info("new"), info("again", attempt=1)]
    reply = desk.sync(*waiting, admitted=2, epoch=3, rates={"a": used_up})
    assert (refused(reply), ids(reply), desk.queued()) == (["new"], ["x"], 2)
    assert reply.rate_limits["a"].requests.remaining == 0
    desk.clock.now += 1
    assert desk.router.accounts.quotas["a"].rate_limits().requests.remaining == 1


def test_what_ends_later_gives_back_what_it_did_not_use():
    desk = Desk(slots=2, a=LIMITED)
    desk.sync(endings=(ending(info("x"), produced=10),), epoch=3, rates={"a": TOLD})
    assert left(desk) == (19, 2_000 + 40 - 150)


def test_rates_of_this_epoch_are_its_own_and_not_learnt():
    desk = Desk(slots=2, a=LIMITED)
    desk.sync(rates={"a": TOLD, "nobody": TOLD}, rates_epoch=EPOCH)
    assert left(desk) == (59, 6_000 - 150)


def test_rates_that_come_late_or_from_several_ingresses_count_once():
    desk = Desk(slots=2, a=LIMITED)
    for name in ("i", "j", "i"):
        desk.sync(ingress=name, rates={"a": TOLD, "nobody": TOLD}, rates_epoch=3)
    assert left(desk) == (19, 2_000 - 150)


def test_a_tenant_without_limits_learns_none():
    desk = Desk(slots=2, a={})
    desk.sync(rates={"a": TOLD}, rates_epoch=3)
    assert desk.sync(info()).rate_limits["a"] == RateLimits()

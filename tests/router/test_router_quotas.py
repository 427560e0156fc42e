"""Quotas in the conversation between an ingress and the router."""

from __future__ import annotations

from math import ceil

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.messages import LeaseInfo, Outcome, RateLimit, RefusalKind
from router.policy import FairPolicy
from router.pricing import PriceList, Prices
from tests.router.desk import EPOCH, Desk, ending, ids, info, infos, refused
from tests.router.world import World, assert_drained, assert_work_conserving, tenants_of


def test_a_request_refused_for_concurrency_uses_no_rate():
    """C52: A runs, B is refused, A ends, C is admitted: two requests used."""
    desk = Desk(slots=2, a={"requests_per_minute": 2, "max_concurrency": 1, "max_queued": 0})
    assert ids(desk.sync(info("A"))) == ["A"]
    lease = LeaseInfo(info("A"), "r")
    assert refused(desk.sync(info("B"), leases=(lease,))) == ["B"]
    reply = desk.sync(info("C"), endings=(ending(info("A")),))
    assert ids(reply) == ["C"]
    assert reply.rate_limits["a"].requests == RateLimit(2, 0, pytest.approx(60.0))


def test_refusals_leave_the_remaining_tokens_alone():
    """C49: 50 of 100 used: ten requests for 90, then one for 40."""
    desk = Desk(slots=20, a={"tokens_per_minute": 100})
    desk.sync(info("first", prompt_tokens=20, max_tokens=30))
    big = [info(f"big{i}", prompt_tokens=60, max_tokens=30) for i in range(10)]
    lease = LeaseInfo(info("first", prompt_tokens=20, max_tokens=30), "r")
    reply = desk.sync(*big, leases=(lease,))
    assert len(refused(reply)) == 10
    assert reply.rate_limits["a"].tokens.remaining == 50
    small = info("small", prompt_tokens=10, max_tokens=30)
    reply = desk.sync(small, leases=(lease,))
    assert ids(reply) == ["small"]
    assert reply.rate_limits["a"].tokens.remaining == 10


def test_a_request_without_a_limit_holds_what_is_likely_and_settles():
    """R38: a default of 1,024 above the cap of a minute is no reason to refuse."""
    desk = Desk(slots=1, a={"tokens_per_minute": 100})
    new = info(prompt_tokens=5, max_tokens=1024, open_ended=True)
    assert ids(desk.sync(new)) == ["x"]
    reply = desk.sync(endings=(ending(new, produced=20),))
    assert reply.rate_limits["a"].tokens.remaining == 75


@pytest.mark.parametrize(
    "limits",
    [{"requests_per_minute": 1}, {"tokens_per_minute": 150}, {"daily_budget": 250e-6}],
)
def test_a_refusal_says_when_to_come_back_and_that_is_true(limits):
    """C40"""
    desk = Desk(slots=9, a=limits)
    assert ids(desk.sync(info("x"))) == ["x"]
    desk.sync(endings=(ending(info("x"), produced=50),))
    [refusal] = desk.sync(info("y")).refusals
    assert refusal.kind in (RefusalKind.RATE, RefusalKind.BUDGET)
    desk.clock.now += ceil(refusal.retry_after_s)
    desk.report(slots=9)
    assert ids(desk.sync(info("z"))) == ["z"]


def test_a_grant_says_how_much_output_is_paid_for():
    desk = Desk(slots=9, a={"daily_budget": 130e-6})
    [grant] = desk.sync(info()).grants
    assert grant.max_tokens == 15
    [refusal] = desk.sync(info(), info("y")).refusals
    assert "reserved for requests that run" in refusal.reason
    desk.sync(endings=(ending(info(), produced=15),))
    [refusal] = desk.sync(info("z")).refusals
    assert (refusal.kind, "does not pay" in refusal.reason) == (RefusalKind.BUDGET, True)


@pytest.mark.parametrize(
    ("outcome", "produced", "price"),
    [
        (Outcome.SUCCEEDED, 20, 100 + 40),
        (Outcome.CANCELLED, 3, 100 + 6),
        (Outcome.FAILED, 3, 100 + 6),
        (Outcome.CANCELLED, 0, 100),
    ],
)
def test_what_was_generated_is_paid_for_however_it_ended(outcome, produced, price):
    """C50: the same rule for plain answers, streams, cut streams and failures."""
    desk = Desk(slots=1, a={"daily_budget": 1.0, "tokens_per_minute": 1000})
    desk.sync(info())
    desk.sync(leases=(LeaseInfo(info(), "r", 0),))
    reply = desk.sync(endings=(ending(info(), outcome, produced),))
    tenant = desk.snapshot().tenants["a"]
    assert (tenant.held_micro_dollars, tenant.spent_micro_dollars) == (0, {"1970-01-01": price})
    assert desk.snapshot().usage["a"].micro_dollars == price
    assert reply.rate_limits["a"].tokens.remaining == 1000 - 100 - produced


def test_a_request_given_up_before_it_ran_costs_nothing():
    desk = Desk(slots=0, a={"daily_budget": 1.0, "tokens_per_minute": 1000})
    desk.sync(info())
    assert desk.snapshot().tenants["a"].held_micro_dollars == 200
    desk.sync()
    tenant = desk.snapshot().tenants["a"]
    assert (tenant.held_micro_dollars, tenant.spent_micro_dollars) == (0, {"1970-01-01": 0})
    assert desk.sync(info("y")).rate_limits["a"].tokens.remaining == 1000 - 150


def test_a_request_that_waits_too_long_is_dropped_and_told_until_it_is_heard():
    desk = Desk(slots=0, a={"max_wait_s": 1.0, "requests_per_minute": 10})
    desk.sync(info())
    desk.clock.now += 1.1
    desk.router.expire()
    assert desk.router.take_news() == {"i"}
    for _ in range(2):
        [refusal] = desk.sync(info()).refusals
        assert refusal.kind is RefusalKind.DEADLINE
    reply = desk.sync(info("other"))
    assert reply.refusals == ()
    assert reply.rate_limits["a"].requests.remaining == 9
    assert desk.snapshot().usage["a"].refused == 1


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"tokens_per_minute": 1000}, 6),
        ({"daily_budget": 1e-3}, 10),
        ({"max_concurrency": 2, "max_queued": 1}, 4),
        ({"max_concurrency": 2, "max_queued": 0, "requests_per_minute": 9}, 3),
    ],
)
def test_what_is_asked_for_at_once_is_admitted_or_refused_as_a_whole(limits, count):
    """C52: a refusal of one choice leaves nothing of the others, no matter how far they were."""
    desk = Desk(slots=9, a=limits)
    desk.sync(info("first"))
    desk.sync(endings=(ending(info("first")),))
    before = desk.snapshot().tenants["a"], desk.router.accounts.quotas["a"].rate_limits()
    choices = [info(f"x{i}", group="x") for i in range(count)]
    reply = desk.sync(*choices)
    assert (refused(reply), reply.grants) == ([choice.request_id for choice in choices], ())
    assert len({(refusal.kind, refusal.retry_after_s) for refusal in reply.refusals}) == 1
    after = desk.snapshot().tenants["a"], desk.router.accounts.quotas["a"].rate_limits()
    assert after == before
    assert ids(desk.sync(info("x0", group="x"), info("x1", group="x"))) == ["x0", "x1"]


def test_choices_are_one_request_and_share_what_is_left_of_a_budget():
    limits = {"requests_per_minute": 5, "daily_budget": 240e-6}
    desk = Desk(slots=9, a=limits)
    reply = desk.sync(*(info(f"x{i}", group="x") for i in range(2)))
    assert [grant.max_tokens for grant in reply.grants] == [10, 10]
    assert reply.rate_limits["a"].requests.remaining == 4
    assert desk.sync().rate_limits == {}
    assert desk.sync(info("y")).rate_limits["a"].requests.remaining == 4


def test_what_has_begun_is_not_dropped_for_a_choice_that_waits():
    """It would be charged for the others, and get nothing."""
    desk = Desk(slots=1, a={"max_wait_s": 1.0})
    choices = [info(f"x{i}", group="x") for i in range(2)]
    assert ids(desk.sync(*choices, info("alone"))) == ["x0"]
    desk.sync(choices[1], info("alone"), leases=(LeaseInfo(choices[0], "r", 1),))
    desk.clock.now += 1.1
    desk.router.expire()
    desk.report(slots=1)
    over = (ending(choices[0]),)
    reply = desk.sync(choices[1], info("alone"), endings=over)
    assert (refused(reply), ids(reply)) == (["alone"], ["x1"])


def test_too_much_waiting_of_everybody_is_an_overload():
    desk = Desk(slots=0, policy=FairPolicy(max_waiting=3), a={}, b={})
    desk.sync(*infos(3))
    [refusal] = desk.sync(*infos(3), info("y", "b")).refusals
    assert refusal.kind is RefusalKind.OVERLOAD


def test_reload_keeps_counters_and_removal_too():
    limits = {"requests_per_minute": 5, "daily_budget": 1.0}
    desk = Desk(slots=1, a=limits)
    desk.sync(info())
    desk.sync(endings=(ending(info(), produced=50),))
    for tenants in ({"a": {"requests_per_minute": 4, "daily_budget": 1.0}}, {}, {"a": limits}):
        desk.router.update_tenants(tenants_of(**tenants))
    assert desk.snapshot().tenants["a"].spent_micro_dollars == {"1970-01-01": 200}
    assert desk.sync(info("y")).rate_limits["a"].requests.remaining == 3


def test_a_restarted_router_charges_nothing_twice():
    """The ingress shows an ending again that was booked already, and one that was not."""
    limits = {"daily_budget": 1.0}
    desk = Desk(slots=1, a=limits)
    desk.router.learn_booked({"x"})
    desk.router.update_tenants(tenants_of(a=limits), {("a", "1970-01-01"): 300})
    endings = (ending(info("x"), produced=50), ending(info("y"), produced=50))
    reply = desk.sync(endings=endings, epoch=EPOCH - 1)
    assert set(reply.settled) == {"x", "y"}
    assert [entry.request_id for entry in desk.router.take_journal().entries] == ["y"]
    assert desk.snapshot().tenants["a"].spent_micro_dollars == {"1970-01-01": 500}


def test_what_other_routers_spent_counts_with_what_is_not_written_yet():
    desk = Desk(slots=2, a={"daily_budget": 1.0})
    desk.sync(endings=(ending(info("x"), produced=50),))
    desk.router.take_journal()
    desk.sync(endings=(ending(info("y"), produced=50),))
    [account] = desk.router.accounts.windows(["a"])
    desk.router.accounts.learn_spending({account: 1_000})
    assert desk.snapshot().tenants["a"].spent_micro_dollars == {account[1]: 1_200}
    desk.router.accounts.learn_spending({account: 0})
    assert desk.snapshot().tenants["a"].spent_micro_dollars == {account[1]: 1_200}
    desk.router.accounts.learn_spending({("a", "1969-01-01"): 7})


def test_a_restarted_router_holds_for_what_runs():
    desk = Desk(slots=1, a={"daily_budget": 1.0})
    desk.sync(leases=(LeaseInfo(info(), "r", 7),), epoch=EPOCH - 1)
    assert desk.snapshot().tenants["a"].held_micro_dollars == 200


LIMITS = {
    "rich": {"max_concurrency": 3, "max_queued": 5},
    "metered": {
        "requests_per_minute": 20,
        "tokens_per_minute": 300,
        "daily_budget": 400e-6,
        "monthly_budget": 900e-6,
        "max_wait_s": 3.0,
    },
    "low": {"band": 1, "daily_budget": 300e-6, "tokens_per_minute": 200},
}
PRICES = PriceList({"m": Prices(prompt=1.0, cached=0.5, output=2.0)})


class MeteredWorld(RuleBasedStateMachine):
    """Requests come, are granted, produce, are cancelled and lost; limits change."""

    @initialize()
    def begin(self) -> None:
        self.world = World(tenants_of(**LIMITS), cached_share=0.5, prices=PRICES)
        self.world.add_replica(slots=3)
        self.ingress = self.world.add_ingress()

    @rule(
        tenant=st.sampled_from(list(LIMITS)),
        prompt=st.integers(1, 80),
        output=st.integers(1, 30),
        extra=st.integers(0, 60),
        copies=st.integers(1, 4),
    )
    def submit(self, tenant: str, prompt: int, output: int, extra: int, copies: int) -> None:
        sizes = prompt, output, output + extra
        group = f"group-{len(self.world.lengths)}"
        asked = {
            self.world.submit(self.ingress, tenant, *sizes, group=group) for _ in range(copies)
        }
        refusals = self.world.exchange(self.ingress).refusals
        assert {refusal.request_id for refusal in refusals} & asked in (set(), asked)

    @rule(steps=st.integers(1, 10))
    def produce(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()
        self.world.exchange(self.ingress)

    @rule(choice=st.integers(0, 100))
    def cancel(self, choice: int) -> None:
        open_ids = [*self.ingress.waiting, *self.ingress.leases]
        if open_ids:
            self.world.cancel(self.ingress, open_ids[choice % len(open_ids)])

    @rule()
    def lose_reply(self) -> None:
        self.world.deliver(self.ingress.next_sync())

    @rule(seconds=st.sampled_from([0.5, 1.9, 3.5, 40_000.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.clock.now += min(seconds, 3.5)
        self.world.wall.now += seconds
        for replica in self.world.replicas.values():
            self.world.report(replica)
        self.world.router.expire()
        self.world.exchange(self.ingress)

    @rule(tokens=st.integers(100, 400), gone=st.booleans())
    def configure(self, tokens: int, gone: bool) -> None:
        """Money stays as it is: a budget that is lowered may have been spent already."""
        limits = {name: dict(values) for name, values in LIMITS.items()}
        limits["metered"]["tokens_per_minute"] = tokens
        limits["low"]["weight"] = tokens / 100
        if gone:
            del limits["rich"]
        self.world.router.update_tenants(tenants_of(**limits))

    @invariant()
    def spend_stays_within_the_budget(self) -> None:
        if not hasattr(self, "world"):
            return
        for quota in self.world.router.accounts.quotas.values():
            for budget in quota._budgets:
                for account in budget.accounts().values():
                    assert account.reserved >= 0
                    assert account.spent + account.reserved <= budget.limit

    @invariant()
    def no_usable_credit_is_free(self) -> None:
        if hasattr(self, "world"):
            assert_work_conserving(self.world.router)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.router.update_tenants(tenants_of(**LIMITS))
        for _ in range(60 * len(self.world.lengths) + 20):
            self.world.clock.now += 0.3
            for replica in self.world.replicas.values():
                self.world.report(replica)
            self.world.step()
            self.world.exchange(self.ingress)
            self.world.router.expire()
            if not (self.ingress.waiting or self.ingress.leases or self.ingress.endings):
                break
        self.world.exchange(self.ingress)
        assert_drained(self.world.router)
        assert self.world.ended.keys() == self.world.lengths.keys()
        self.check_accounts()

    def check_accounts(self) -> None:
        """The journal, the totals and the budgets tell the same."""
        router = self.world.router
        journal = router.take_journal().entries
        assert len({entry.request_id for entry in journal}) == len(journal)
        for tenant, usage in router.snapshot().usage.items():
            own = [entry for entry in journal if entry.tenant == tenant]
            assert sum(entry.used.prompt for entry in own) == usage.prompt_tokens
            assert sum(entry.used.output for entry in own) == usage.output_tokens
            assert sum(entry.micro_dollars for entry in own) == usage.micro_dollars
            assert all(entry.micro_dollars == PRICES.cost("m", *entry.used) for entry in own)
            for window, spent in router.snapshot().tenants[tenant].spent_micro_dollars.items():
                assert spent == sum(e.micro_dollars for e in own if window in e.windows)


MeteredWorld.TestCase.settings = settings(deadline=None)
TestMeteredWorld = MeteredWorld.TestCase

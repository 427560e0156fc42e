from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.messages import RateLimit, RefusalKind, RequestInfo
from router.pricing import PriceList, Prices
from router.quota import Denial, Quota, Reservation
from router.tenant import Tenant
from tests.router.world import Clock

PRICES = PriceList({"m": Prices(prompt=1.0, cached=0.5, output=2.0)})
"""Micro-dollars per token."""


@dataclass
class Desk:
    """One tenant's quota and a clock."""

    quota: Quota
    clock: Clock

    def reserve(self, prompt: int = 5, output: int = 20) -> Reservation | Denial:
        return self.quota.reserve(RequestInfo("r", "a", prompt, output, model="m"), output)

    def settle(
        self, reservation: Reservation, prompt: int = 5, cached: int = 0, output: int = 20
    ) -> int:
        price = PRICES.cost("m", prompt, cached, output)
        self.quota.settle(reservation, prompt + output, price)
        return price


def desk_of(**limits: object) -> Desk:
    clock = Clock()
    return Desk(Quota(Tenant(id="a", **limits), PRICES, clock, clock), clock)


LIMITS = {
    "requests_per_minute": 3,
    "tokens_per_minute": 100,
    "daily_budget": 300e-6,
    "monthly_budget": 1000e-6,
}


def test_a_refusal_changes_nothing():
    """C49: 50 of 100 used; ten requests for 90 are refused, one for 40 is not."""
    desk = desk_of(tokens_per_minute=100)
    assert isinstance(desk.reserve(5, 45), Reservation)
    for _ in range(10):
        denial = desk.reserve(5, 85)
        assert denial.kind is RefusalKind.RATE
        assert desk.quota.rate_limits().tokens.remaining == 50
    assert isinstance(desk.reserve(5, 35), Reservation)
    assert desk.quota.rate_limits().tokens.remaining == 10


def test_a_hold_on_one_dimension_alone_does_not_happen():
    desk = desk_of(requests_per_minute=10, tokens_per_minute=100, daily_budget=1.0)
    assert isinstance(desk.reserve(5, 95), Reservation)
    before = desk.quota.rate_limits(), desk.quota.reserved()
    assert isinstance(desk.reserve(), Denial)
    assert (desk.quota.rate_limits(), desk.quota.reserved()) == before


def test_a_hold_is_replaced_by_what_was_used():
    """C50: prompt of 5, three tokens of twenty."""
    desk = desk_of(**LIMITS)
    reservation = desk.reserve()
    assert (reservation.tokens, reservation.micro, reservation.max_tokens) == (25, 5 + 40, 20)
    assert reservation.windows == ("1970-01-01", "1970-01")
    assert desk.settle(reservation, output=3) == 5 + 6
    assert desk.quota.rate_limits().tokens.remaining == 100 - 8
    assert desk.quota.reserved() == 0
    assert desk.quota.spent() == {"1970-01-01": 11, "1970-01": 11}


def test_more_than_a_minutes_tokens_are_admitted_when_nothing_is_used_and_become_a_debt():
    """C38: no reservation exceeds the cap."""
    desk = desk_of(tokens_per_minute=100)
    reservation = desk.reserve(prompt=150, output=1000)
    assert reservation.tokens == 100
    desk.settle(reservation, prompt=150, output=50)
    assert desk.quota.rate_limits().tokens == RateLimit(100, 0, pytest.approx(120.0))


@pytest.mark.parametrize("dimension", list(LIMITS))
def test_who_waits_as_long_as_told_is_admitted(dimension):
    """C40"""
    desk = desk_of(**{dimension: LIMITS[dimension]})
    desk.clock.now = 86400 * 40 - 0.5
    while isinstance(reservation := desk.reserve(40, 20), Reservation):
        desk.settle(reservation, 40, 0, 20)
    retry_s = ceil(reservation.retry_after_s)
    assert retry_s >= 1
    budget = "budget" in dimension
    assert reservation.kind is (RefusalKind.BUDGET if budget else RefusalKind.RATE)
    limits = desk.quota.rate_limits()
    if not budget:
        told = limits.requests or limits.tokens
        assert told.reset_s >= reservation.retry_after_s > 0
    desk.clock.now += retry_s
    assert isinstance(desk.reserve(40, 20), Reservation)


def test_the_longest_wait_of_all_dimensions_is_told():
    desk = desk_of(requests_per_minute=60, tokens_per_minute=60)
    for _ in range(60):
        desk.reserve(0, 1)
    assert desk.reserve(10, 20).retry_after_s == pytest.approx(30.0)
    assert "60 requests per minute and 60 tokens per minute" in desk.reserve(10, 20).reason


def test_money_is_held_at_the_worst_case_and_caps_the_answer():
    desk = desk_of(daily_budget=100e-6)
    first = desk.reserve(prompt=10, output=1000)
    assert (first.micro, first.max_tokens) == (100, 45)
    held = desk.reserve(prompt=10, output=1)
    assert held.kind is RefusalKind.RATE
    assert "reserved for requests that run" in held.reason
    desk.settle(first, prompt=10, output=40)
    assert desk.reserve(prompt=8, output=5).max_tokens == 1
    spent = desk.reserve(prompt=10, output=1)
    assert spent.kind is RefusalKind.BUDGET
    assert "left of the budget of this day" in spent.reason


def test_what_the_whole_budget_does_not_pay_for_is_told_so():
    """It would come back at the end of every day."""
    small = {"daily_budget": 11e-6, "models": ["m"]}
    for limits in (small, {**small, "monthly_budget": 100e-6}):
        assert desk_of(**limits).reserve(prompt=10, output=1).kind is RefusalKind.TOO_DEAR
    nothing = desk_of(**small | {"daily_budget": 0.0}).reserve(prompt=10, output=1)
    assert nothing.kind is RefusalKind.BUDGET


def test_a_refund_leaves_no_trace():
    desk = desk_of(**LIMITS)
    before = desk.quota.rate_limits()
    desk.quota.refund(desk.reserve())
    assert desk.quota.rate_limits() == before
    assert (desk.quota.reserved(), set(desk.quota.spent().values())) == (0, {0})


def test_new_limits_keep_what_was_used_and_old_holds_are_settled():
    desk = desk_of(**LIMITS)
    reservation = desk.reserve()
    desk.quota.configure(Tenant(id="a", tokens_per_minute=500, daily_budget=100e-6))
    assert desk.quota.rate_limits().tokens.remaining == 475
    assert desk.quota.rate_limits().requests is None
    desk.settle(reservation)
    assert desk.quota.reserved() == 0
    assert desk.quota.spent()["1970-01-01"] == 45
    assert desk.reserve(prompt=10, output=100).max_tokens == 22


def test_what_was_free_is_settled_after_its_window_is_over():
    """Nothing is held for it, so the budget has forgotten the window by then."""
    desk = desk_of(**LIMITS)
    reservation = desk.quota.reserve(RequestInfo("r", "a", 5, 20, model="free"), 20)
    desk.clock.now += 2 * 86400
    assert desk.quota.windows() == ("1970-01-03", "1970-01")
    desk.quota.settle(reservation, 25, 0)
    assert (desk.quota.reserved(), set(desk.quota.spent().values())) == (0, {0})


def test_an_unlimited_tenant_holds_nothing_and_is_told_nothing():
    desk = desk_of()
    assert desk.reserve() == Reservation(0, 0, (), (), 20)
    assert desk.quota.rate_limits() == desk.quota.rate_limits().__class__()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "refund"]),
        st.integers(0, 60),
        st.integers(1, 60),
        st.floats(0, 1),
        st.sampled_from([0.0, 1.0, 30.0, 40_000.0]),
    ),
    max_size=60,
)


@given(STEPS)
def test_one_alone_is_held_for_as_a_group_of_one(steps):
    one, many = desk_of(**LIMITS), desk_of(**LIMITS)
    for action, prompt, output, _, seconds in steps:
        one.clock.now = many.clock.now = one.clock.now + seconds
        if action == "reserve":
            info = RequestInfo("r", "a", prompt, output, model="m")
            alone, grouped = (
                one.quota.reserve(info, output),
                many.quota.reserve_all([(info, output)]),
            )
            assert alone == (grouped if isinstance(grouped, Denial) else grouped[0])
            assert one.quota.rate_limits() == many.quota.rate_limits()


@given(STEPS)
def test_money_never_exceeds_the_budget_and_holds_return_to_zero(steps):
    """In each window, whatever comes when; and what is spent is the price of what was used."""
    desk = desk_of(**LIMITS)
    open_reservations: list[tuple[Reservation, int]] = []
    prices: dict[str, int] = {}
    for action, prompt, output, share, seconds in steps:
        desk.clock.now += seconds
        if action == "reserve" and isinstance(
            reservation := desk.reserve(prompt, output), Reservation
        ):
            assert 1 <= reservation.max_tokens <= output
            open_reservations.append((reservation, prompt))
        elif action == "settle" and open_reservations:
            reservation, used = open_reservations.pop(int(share * (len(open_reservations) - 1)))
            produced, cached = int(share * reservation.max_tokens), int(share * used)
            price = desk.settle(reservation, used, cached, produced)
            for name in reservation.windows:
                prices[name] = prices.get(name, 0) + price
        elif action == "refund" and open_reservations:
            desk.quota.refund(open_reservations.pop()[0])
        for budget in desk.quota._budgets:
            for name, account in budget.accounts().items():
                assert account.reserved >= 0
                assert account.reserved + account.spent <= budget.limit
                assert account.spent == prices.get(name, 0)
    for reservation, _ in open_reservations:
        desk.quota.refund(reservation)
    assert desk.quota.reserved() == 0


@pytest.mark.parametrize(
    ("budget", "told"), [(0.000001, "0.000001"), (0.000005, "0.000005"), (0.0000062, "0.000006")]
)
def test_a_small_budget_is_told_as_what_it_is(budget: float, told: str) -> None:
    denial = desk_of(daily_budget=budget).reserve()
    assert isinstance(denial, Denial)
    assert f"({told} dollars)" in denial.reason


def test_a_clock_that_was_ahead_for_a_moment_pins_no_budget():
    desk = desk_of(daily_budget=100e-6, monthly_budget=1.0)
    assert desk.settle(desk.reserve()) == 45
    desk.clock.now += 400 * 86400
    ahead = desk.reserve()
    assert ahead.windows == ("1971-02-05", "1971-02")
    desk.clock.now -= 400 * 86400
    desk.settle(ahead)
    assert desk.quota.spent() == {"1970-01-01": 45, "1970-01": 45}
    assert desk.settle(desk.reserve()) == 45
    denial = desk.reserve(prompt=11)
    assert denial.kind is RefusalKind.BUDGET
    assert denial.retry_after_s <= 86400
    desk.clock.now += 86400
    assert isinstance(desk.reserve(), Reservation)

from collections import Counter
from datetime import datetime, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.budget import KEPT, Budget, window, zone


def at(text: str, tz: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone(tz)).timestamp()


def test_a_day_and_a_month_have_ids_and_ends():
    now = at("2026-02-28T13:00:00")
    day = ("2026-02-28", at("2026-02-28T00:00:00"), at("2026-03-01T00:00:00"))
    assert window("day", now, timezone.utc) == day
    month = ("2026-02", at("2026-02-01T00:00:00"), at("2026-03-01T00:00:00"))
    assert window("month", now, timezone.utc) == month
    december = window("month", at("2026-12-31T23:59:59"), timezone.utc)
    assert december == ("2026-12", at("2026-12-01T00:00:00"), at("2027-01-01T00:00:00"))


def test_a_window_is_that_of_the_time_zone():
    now = at("2026-01-31T23:30:00")
    assert window("day", now, ZoneInfo("Asia/Kolkata")).id == "2026-02-01"
    assert window("month", now, ZoneInfo("America/New_York")).id == "2026-01"


@pytest.mark.parametrize(("day", "hours"), [("2026-03-29", 23), ("2026-10-25", 25)])
def test_days_on_which_clocks_change_are_shorter_or_longer(day, hours):
    berlin = ZoneInfo("Europe/Berlin")
    noon = datetime.fromisoformat(f"{day}T12:00:00").replace(tzinfo=berlin).timestamp()
    midnight = datetime.fromisoformat(f"{day}T00:00:00").replace(tzinfo=berlin).timestamp()
    assert window("day", noon, berlin).ends_at - midnight == hours * 3600


@pytest.mark.parametrize(
    ("tz", "day"),
    [
        ("Europe/Berlin", "2026-03-29"),
        ("America/Havana", "2026-11-01"),  # where half past midnight comes twice
        ("America/Sao_Paulo", "2018-11-04"),  # where no midnight was
        ("America/Sao_Paulo", "2018-02-18"),  # where half past eleven came twice
    ],
)
def test_every_moment_lies_in_the_window_that_it_has(tz, day):
    there = ZoneInfo(tz)
    moment = at(f"{day}T00:00:00") - 36 * 3600
    for _ in range(24 * 12 * 3):
        moment += 300
        found = window("day", moment, there)
        assert found.begins_at <= moment < found.ends_at <= moment + 25 * 3600
        assert window("day", found.ends_at, there).id > found.id
        assert window("day", found.begins_at, there) == found
        assert window("day", found.begins_at - 1, there).id < found.id


def test_a_new_window_starts_at_zero_and_old_holds_are_settled_in_the_old_one():
    now = at("2026-03-01T23:59:00")
    budget = Budget("day", 100, timezone.utc)
    old = budget.account(now)
    old.reserved += 60
    assert budget.remaining(now) == 40
    tomorrow = now + 120
    assert budget.remaining(tomorrow) == 100
    old.reserved, old.spent = 0, 55
    assert budget.remaining(tomorrow) == 100
    assert budget.remaining(tomorrow + 86400) == 100
    assert list(budget.accounts()) == ["2026-03-03"]


def test_a_clock_that_was_ahead_for_a_moment_costs_nobody_the_real_day():
    now = at("2026-03-02T12:00:00")
    budget = Budget("day", 100, timezone.utc)
    budget.account(now).spent = 60
    assert budget.remaining(now + 400 * 86400) == 100
    assert budget.remaining(now) == 40, "neither the far day's money, nor a fresh one's"
    budget.account(now).spent = 100
    assert budget.remaining(now + 86400) == 100


@given(st.lists(st.floats(-40 * 86400, 40 * 86400), max_size=30))
def test_a_window_is_paid_for_once_however_the_clock_is_put(steps):
    """It is known of the last few windows; where more come up, whoever keeps books tells again."""
    now, spent = at("2026-03-02T12:00:00"), Counter()
    budget = Budget("day", 100, timezone.utc)
    for step in steps:
        now += step
        account = budget.account(now)
        assert account.window == window("day", now, timezone.utc).id
        budget.learn(account.window, spent[account.window])
        affordable = min(30, budget.remaining(now))
        account.spent += affordable
        spent[account.window] += affordable
        assert spent[account.window] <= 100
        assert len(budget._accounts) <= KEPT


def test_a_clock_put_back_over_midnight_finds_what_was_spent_before_it():
    midnight = at("2026-03-02T00:00:00")
    budget = Budget("day", 100, timezone.utc)
    budget.account(midnight - 1).spent = 60
    assert budget.remaining(midnight + 1) == 100
    assert budget.remaining(midnight - 1) == 40
    assert list(budget.accounts()) == ["2026-03-01"], "only what counts now is shown"


def test_what_was_spent_before_is_taken_over():
    budget = Budget("month", 100, timezone.utc)
    budget.account(at("2026-03-15T00:00:00"))
    budget.learn("2026-02", 90)
    budget.learn("2026-03", 70)
    assert budget.remaining(at("2026-03-15T00:00:00")) == 30
    assert budget.remaining(at("2026-04-01T00:00:00")) == 100


def test_an_unknown_time_zone_is_refused():
    with pytest.raises(ValueError, match="not a known time zone"):
        zone("Mars/Olympus")

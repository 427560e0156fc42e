from datetime import datetime, timezone
from zoneinfo import ZoneInfo

import pytest

from router.budget import Budget, window, zone


def at(text: str, tz: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone(tz)).timestamp()


def test_a_day_and_a_month_have_ids_and_ends():
    now = at("2026-02-28T13:00:00")
    assert window("day", now, timezone.utc) == ("2026-02-28", at("2026-03-01T00:00:00"))
    assert window("month", now, timezone.utc) == ("2026-02", at("2026-03-01T00:00:00"))
    december = window("month", at("2026-12-31T23:59:59"), timezone.utc)
    assert december == ("2026-12", at("2027-01-01T00:00:00"))


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


def test_every_moment_lies_in_the_window_that_it_has():
    berlin = ZoneInfo("Europe/Berlin")
    moment = at("2026-03-28T00:00:00")
    for _ in range(24 * 12 * 3):
        moment += 300
        found = window("day", moment, berlin)
        assert moment < found.ends_at <= moment + 25 * 3600
        assert window("day", found.ends_at, berlin).id > found.id


def test_a_new_window_starts_at_zero_and_old_holds_are_settled_in_the_old_one():
    now = at("2026-03-01T23:59:00")
    budget = Budget("day", 100, timezone.utc)
    held = budget.account(now)
    held.held += 60
    assert budget.remaining(now) == 40
    tomorrow = now + 120
    assert budget.remaining(tomorrow) == 100
    held.held, held.spent = 0, 55
    assert budget.remaining(tomorrow) == 100
    assert budget.remaining(tomorrow + 86400) == 100
    assert list(budget.accounts()) == ["2026-03-03"]


def test_a_clock_that_is_put_back_opens_no_old_window():
    now = at("2026-03-02T00:00:01")
    budget = Budget("day", 100, timezone.utc)
    budget.account(now).spent = 60
    assert budget.remaining(now - 10) == 40


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

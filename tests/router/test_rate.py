import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.rate import Bucket


def test_a_minute_is_there_at_once_and_comes_back_in_a_minute():
    bucket = Bucket(60, now=0.0)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.take(60)
    assert bucket.level(0.0) == 0
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.level(30.0) == pytest.approx(30)
    assert bucket.level(600.0) == 60


def test_more_than_was_taken_becomes_a_debt():
    bucket = Bucket(60, now=0.0)
    bucket.take(90)
    assert bucket.level(0.0) == -30
    assert bucket.wait_s(1, 0.0) == pytest.approx(31.0)


def test_a_new_limit_keeps_what_was_used():
    bucket = Bucket(60, now=0.0)
    bucket.take(50)
    bucket.resize(100, 0.0)
    assert bucket.level(0.0) == 50
    bucket.resize(30, 0.0)
    assert bucket.level(0.0) == -20


def test_what_was_used_elsewhere_is_not_there_and_what_was_used_here_stays_used():
    bucket = Bucket(60, now=0.0)
    bucket.lower(60, reset_s=90.0, now=0.0)
    assert bucket.level(0.0) == -30
    bucket.lower(60, reset_s=10.0, now=0.0)
    assert bucket.level(0.0) == -30
    bucket.lower(120, reset_s=60.0, now=0.0)
    assert bucket.level(0.0) == -60


@given(
    st.lists(st.tuples(st.integers(0, 30), st.floats(0, 20)), max_size=20),
    st.integers(1, 30),
    st.data(),
)
def test_units_that_were_taken_and_given_back_cost_nothing(takes, units, data):
    """Whatever happened between; what may be gained is refill that would have overflowed."""
    bucket, twin, now = Bucket(60, 0.0), Bucket(60, 0.0), 0.0
    borrowed = data.draw(st.integers(0, len(takes)))
    for index, (amount, seconds) in enumerate([*takes, (0, 0.0)]):
        if index == borrowed:
            bucket.take(units)
        for each in (bucket, twin):
            each.level(now)
            each.take(amount)
        now += seconds
    bucket.level(now)
    twin.level(now)
    bucket.take(-units)
    gained = bucket.level(now) - twin.level(now)
    assert -1e-6 <= gained <= units + 1e-6
    if all(seconds == 0 for _, seconds in takes):
        assert gained == pytest.approx(0)

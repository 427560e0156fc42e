from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.band_order import BandOrder
from router.policy import FairPolicy
from router.priority_band import PriorityBand

POLICY = FairPolicy(band_shares=(0.0, 0.2, 0.1, 0.0), band_wait_s=30.0)
NEVER_AGED = FairPolicy(band_shares=(0.0, 0.2, 0.1, 0.05), band_wait_s=1e9)
BANDS = [PriorityBand(index, POLICY) for index in range(4)]


def serve(
    order: BandOrder, waiting: list[int], grants: int, now: float = 0.0, step_s: float = 0.0
) -> list[int]:
    """Who is granted, if every band always has something."""
    chosen = []
    for _ in range(grants):
        order.observe(waiting, now)
        first = order.sort([BANDS[index] for index in waiting], now)[0].index
        order.granted(first, 10.0, now)
        chosen.append(first)
        now += step_s
    return chosen


def test_lower_bands_get_their_shares_and_the_first_gets_the_rest():
    chosen = serve(BandOrder(POLICY), [0, 1, 2], 1000)
    assert [chosen.count(band) for band in (0, 1, 2)] == pytest.approx([700, 200, 100], abs=2)


WAITING = st.sets(st.integers(0, 3), min_size=1)
SPANS = st.lists(
    st.tuples(WAITING, st.sampled_from([1.0, 10.0, 500.0]), st.integers(1, 20)), max_size=12
)
"""Which bands wait, what a request costs that is granted meanwhile, and how many are."""


@example([({1, 2}, 500.0, 2), ({0, 1}, 500.0, 10)])
@given(SPANS)
def test_a_waiting_band_is_never_more_than_a_request_below_its_share(spans):
    """Of any interval, whoever else comes and goes. Bands that are owed at the same time are
    served one after the other: that adds to the later one its share of what they get."""
    order = BandOrder(NEVER_AGED)
    lead: dict[int, list[float]] = {}
    for waiting, cost, grants in spans:
        bands = sorted(waiting)
        lead = {band: lead.get(band, [0.0]) for band in bands}
        for _ in range(grants):
            order.observe(bands, 0.0)
            first = order.sort([BANDS[band] for band in bands], 0.0)[0].index
            order.granted(first, cost, 0.0)
            for band, course in lead.items():
                owed = course[-1] + NEVER_AGED.band_shares[band] * cost
                course.append(owed - (cost if band == first else 0.0))
                before = max(band - 1, 0)
                limit = 500.0 * (1 + 2 * before * NEVER_AGED.band_shares[band])
                assert course[-1] - min(course) <= limit + 1e-6


def test_a_share_is_all_that_a_lower_band_gets():
    order, rng, served = BandOrder(POLICY), random.Random(1), {0: 0.0, 1: 0.0}
    for _ in range(2000):
        order.observe([0, 1], 0.0)
        first = order.sort(BANDS[:2], 0.0)[0].index
        cost = rng.choice([1.0, 10.0, 500.0])
        order.granted(first, cost, 0.0)
        served[first] += cost
    assert served[1] / sum(served.values()) == pytest.approx(0.2, abs=0.01)


def test_a_band_that_was_alone_has_no_debt_when_others_come():
    order = BandOrder(POLICY)
    serve(order, [1], 1000)
    chosen = serve(order, [0, 1], 20)
    assert chosen.count(1) == pytest.approx(4, abs=1)


def test_nothing_is_owed_for_a_time_in_which_a_band_wanted_nothing():
    order = BandOrder(POLICY)
    serve(order, [0], 1000)
    chosen = serve(order, [0, 1], 20)
    assert chosen.count(1) == pytest.approx(4, abs=1)


def test_a_band_without_a_share_goes_next_once_it_has_waited_too_long():
    chosen = serve(BandOrder(POLICY), [0, 3], 200, step_s=1.0)
    turns = [index for index, band in enumerate(chosen) if band == 3]
    assert turns[0] == 31
    assert {later - earlier for earlier, later in pairwise(turns)} == {31}

"""What the GPUs' time went into, and what an answer cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cost import cost_of, gpu_seconds, usage_report
from router.ledger import Entry, Journal, Used
from router.messages import GpuTime, LeaseInfo, Outcome
from router.store import HOUR_S, SqliteStore
from tests.router.desk import Desk, ending, info

GPU = GpuTime(requests=10.0, surplus=1.0, bubble=0.5, starved=0.25, spare=8.25, starting=20.0)


def test_a_request_costs_what_its_ingress_saw_last():
    """Also the one whose ingress never tells how it ended."""
    desk = Desk(slots=4)
    desk.sync(info("x"), info("y"))
    leases = tuple(LeaseInfo(info(name), "r", 3, 0, gpu_s=2.0) for name in ("x", "y"))
    desk.sync(leases=leases)
    desk.sync(leases=leases[1:], endings=(replace(ending(info("x")), gpu_s=2.5),))
    desk.clock.now += 100
    desk.router.expire()
    bills = {entry.request_id: entry.gpu_s for entry in desk.router.take_journal().entries}
    assert bills == {"x": 2.5, "y": 2.0}
    assert desk.snapshot().usage["a"].gpu_s == 4.5


def test_what_replicas_tell_of_their_time_is_written_down_once_until_they_tell_again():
    desk = Desk(slots=1)
    desk.report(1, gpu=GPU)
    assert desk.router.take_journal().gpu == {"r": GPU}
    desk.report(0)
    assert desk.router.take_journal().gpu == {}


def test_an_answer_costs_its_share_of_all_gpu_time_that_there_was():
    store = SqliteStore(":memory:")
    ended = [
        Entry(str(number), tenant, "m", Outcome.SUCCEEDED, Used(1, 0, 1), 5, met, (), 2.0)
        for number, (tenant, met) in enumerate([("a", True), ("a", False), ("b", True)])
    ]
    store.book(Journal(ended, Counter(), {"r": GPU}, {}), HOUR_S + 1.0)
    report = usage_report(store, 0, 1e9, "a", dollars_per_hour=3.6)
    [row] = report.rows
    assert (row.tenant, gpu_seconds(row)) == ("a", 4.0)
    assert report.cost.gpu_seconds["open"] == 4.0
    assert report.cost.dollars == pytest.approx(0.040)
    assert report.cost.good_responses == 2
    assert report.cost.dollars_per_good_response == pytest.approx(0.020)


def test_without_a_price_or_without_answers_there_is_no_cost_of_one():
    assert cost_of([], GPU, None).dollars_per_good_response is None
    assert cost_of([], GPU, 3.6).dollars_per_good_response is None


SECONDS = st.integers(0, 10**9).map(lambda micros: micros / 1e6)
REPLICAS = st.dictionaries(st.sampled_from("pqr"), st.builds(GpuTime, *[SECONDS] * 6), min_size=1)
BILLS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(Outcome), SECONDS), max_size=8)


@given(hours=st.lists(st.tuples(REPLICAS, BILLS), min_size=1, max_size=4))
def test_the_outcomes_of_any_hours_add_up_to_the_time_of_all_gpus_in_them(hours):
    store, told, spans = SqliteStore(":memory:"), {}, []
    for hour, (growth, bills) in enumerate(hours):
        for name, more in growth.items():
            told[name] = _sum(told.get(name, GpuTime()), more)
        entries = [
            Entry(f"{hour}-{index}", tenant, "m", outcome, Used(), 0, False, (), seconds)
            for index, (tenant, outcome, seconds) in enumerate(bills)
        ]
        store.book(Journal(entries, Counter(), dict(told), {}), hour * HOUR_S + 5.0)
        spans.append(sum(_total(more) for more in growth.values()))
    for first in range(len(hours)):
        report = usage_report(store, first * HOUR_S, len(hours) * HOUR_S, None, None)
        assert sum(report.cost.gpu_seconds.values()) == pytest.approx(sum(spans[first:]), abs=1e-4)
    store.close()


def _sum(one: GpuTime, other: GpuTime) -> GpuTime:
    return GpuTime(*(getattr(one, n) + getattr(other, n) for n in GpuTime.__slots__))


def _total(time: GpuTime) -> float:
    return sum(getattr(time, name) for name in GpuTime.__slots__)

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replica.idle import IdleMeter


def test_each_gap_is_blamed_on_whoever_caused_it():
    meter = IdleMeter(started_ns=0)
    meter.work_arrived(100)  # 0..100: nobody waited
    meter.computed(130, 200)  # 100..130: work was here
    meter.computed(205, 300)  # 200..205: work was here
    meter.work_ended()  # since 300
    meter.backlog_changed(True, 350)  # 300..350: nobody waited
    meter.backlog_changed(False, 390)  # 350..390: the router had work, no grant for us
    meter.work_arrived(400)  # 390..400: nobody waited
    meter.computed(401, 500)
    assert meter.busy_ns == 70 + 95 + 99
    assert meter.bubble_ns == 30 + 5 + 1
    assert meter.starved_ns == 40
    assert meter.spare_ns == 100 + 50 + 10


def test_idle_time_is_visible_while_it_lasts():
    meter = IdleMeter(started_ns=0)
    meter.book_idle(70)
    meter.book_idle(90)
    assert meter.spare_ns == 90


def test_time_between_the_last_result_and_its_collection_is_not_a_bubble():
    meter = IdleMeter(started_ns=0)
    meter.work_arrived(0)
    meter.computed(0, 100)
    meter.work_ended()  # the CPU noticed later, at 120 say
    meter.book_idle(150)
    assert (meter.bubble_ns, meter.spare_ns) == (0, 50)


@given(st.lists(st.tuples(st.sampled_from("wsbeBk"), st.integers(1, 50)), max_size=60))
def test_the_classes_add_up_to_wall_time(events):
    meter, now, working, last_end = IdleMeter(started_ns=0), 0, False, 0
    for kind, delay in events:
        now += delay
        if kind == "w":
            meter.work_arrived(now)
            working = True
        elif kind == "s" and working:
            meter.computed(now, now + delay)
            now = last_end = now + delay
        elif kind == "e" and working and last_end == now:
            meter.work_ended()
            working = False
        elif kind in "bB":
            meter.backlog_changed(kind == "B", now)
        else:
            meter.book_idle(now)
    if working:
        meter.computed(now, now)
    meter.book_idle(now)
    total = meter.busy_ns + meter.bubble_ns + meter.starved_ns + meter.spare_ns
    assert total == now
    assert min(meter.busy_ns, meter.bubble_ns, meter.starved_ns, meter.spare_ns) >= 0

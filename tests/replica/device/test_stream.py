"""Host streams mean what CUDA's mean."""

from __future__ import annotations

import threading
import time

import pytest

from replica.device.stream import HostDevice, StreamFailure


@pytest.fixture
def streams():
    device = HostDevice()
    pair = device.stream("a"), device.stream("b")
    yield device, *pair
    for stream in pair:
        stream.close()


def test_work_runs_in_order_and_off_the_caller(streams):
    device, a, _ = streams
    ran: list[int] = []
    for number in range(100):
        a.run(lambda number=number: ran.append(number))
    done = device.event(a)
    done.record()
    done.synchronize()
    assert ran == list(range(100))


def test_enqueueing_never_blocks_on_earlier_work(streams):
    _, a, _ = streams
    release = threading.Event()
    a.run(lambda: release.wait(5) and None)
    started = time.perf_counter()
    a.run(lambda: None)
    assert time.perf_counter() - started < 1
    release.set()


def test_a_wait_orders_two_streams(streams):
    device, a, b = streams
    release, seen = threading.Event(), []
    a.run(lambda: release.wait(5) and None)
    a.run(lambda: seen.append("a"))
    a_done, b_done = device.event(a), device.event(b)
    a_done.record()
    a_done.block(b)
    b.run(lambda: seen.append("b"))
    b_done.record()
    time.sleep(0.02)
    assert seen == []
    release.set()
    b_done.synchronize()
    assert seen == ["a", "b"]


def test_an_event_that_was_never_recorded_holds_nobody(streams):
    device, a, b = streams
    device.event(a).block(b)
    device.event(a).synchronize()
    done = device.event(b)
    done.record()
    done.synchronize()


def test_a_wait_is_for_the_newest_record_at_the_time_of_the_call(streams):
    device, a, b = streams
    release = threading.Event()
    event, done = device.event(a), device.event(b)
    event.record()
    event.block(b)
    a.run(lambda: release.wait(5) and None)
    event.record()  # later than the wait: it does not count
    done.record()
    done.synchronize()
    release.set()
    event.synchronize()


def test_a_failure_skips_what_follows_and_reaches_whoever_waits(streams):
    device, a, b = streams
    ran: list[str] = []
    a.run(lambda: 1 / 0 and None)
    a.run(lambda: ran.append("a"))
    event, done = device.event(a), device.event(b)
    event.record()
    event.block(b)
    b.run(lambda: ran.append("b"))
    done.record()
    with pytest.raises(StreamFailure):
        done.synchronize()
    assert ran == []


def test_events_tell_when_they_were_reached(streams):
    device, a, _ = streams
    start, end = device.event(a), device.event(a)
    start.record()
    a.run(lambda: time.sleep(0.02))
    end.record()
    assert 0.02e9 <= end.time_ns() - start.time_ns() < 1e9
    with pytest.raises(ValueError, match="never recorded"):
        device.event(a).time_ns()

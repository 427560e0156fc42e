"""Recordings on a GPU, and times of events."""

from __future__ import annotations

import pytest
import torch

from replica.device.cuda import CudaRecorder


def test_a_recording_is_replayed_over_what_its_inputs_hold_then(device):
    compute = device.stream("compute")
    x, y = torch.full((4,), 3.0, device=device.memory), torch.zeros(4, device=device.memory)
    device.settle()
    made = []
    compute.run(lambda: made.append(CudaRecorder(device)(lambda: y.copy_(x * 2))))
    device.settle()
    x.fill_(5.0)
    device.settle()
    compute.run(made[0].replay)
    device.settle()
    assert y.tolist() == [10.0] * 4


def test_events_are_times_on_the_clock_of_the_host(device):
    import time

    compute = device.stream("compute")
    start, end = device.event(compute, timed=True), device.event(compute, timed=True)
    for _ in range(3):
        began = time.perf_counter_ns()
        start.record()
        compute.run(lambda: torch.cuda._sleep(20_000_000))
        end.record()
        end.synchronize()
        now = time.perf_counter_ns()
        assert began - 200_000 < start.time_ns() < end.time_ns() < now + 200_000
        assert end.time_ns() - start.time_ns() > 5_000_000
        time.sleep(0.6)  # beyond the age at which the clock takes a new anchor


def test_an_event_that_was_never_recorded_has_no_time_and_delays_nobody(device):
    event = device.event(device.stream("h2d"), timed=True)
    event.block(device.stream("compute"))
    event.synchronize()
    with pytest.raises(ValueError, match="never recorded"):
        event.time_ns()

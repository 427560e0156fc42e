"""Recordings on a GPU: replayed, renewed, and shared memory."""

from __future__ import annotations

import pytest
import torch

from replica.device.cuda import CudaRecorder


@pytest.fixture
def recorder(device) -> CudaRecorder:
    return CudaRecorder(device)


def doubling(x: torch.Tensor, y: torch.Tensor):
    return lambda: y.copy_(x * 2)


def test_a_recording_is_renewed_in_place_where_its_structure_is_the_same(device, recorder):
    compute = device.stream("compute")
    made = []
    first, second = (
        (torch.full((4,), value, device=device.memory), torch.zeros(4, device=device.memory))
        for value in (1.0, 5.0)
    )
    device.settle()
    compute.run(lambda: made.append(recorder(doubling(*first))))
    (recording,) = made
    compute.run(lambda: recording.renew(doubling(*second)))
    assert recording.updated_in_place
    second[1].zero_()
    device.settle()
    compute.run(recording.replay)
    device.settle()
    assert second[1].tolist() == [10.0] * 4


def test_a_recording_of_another_structure_is_instantiated_anew(device, recorder):
    compute = device.stream("compute")
    x, y = torch.full((4,), 3.0, device=device.memory), torch.zeros(4, device=device.memory)
    device.settle()
    made = []
    compute.run(lambda: made.append(recorder(doubling(x, y))))
    (recording,) = made
    compute.run(lambda: recording.renew(lambda: y.copy_((x * 2).sin().cos() + 1)))
    assert not recording.updated_in_place
    y.zero_()
    device.settle()
    compute.run(recording.replay)
    device.settle()
    torch.testing.assert_close(y, (x * 2).sin().cos() + 1)


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

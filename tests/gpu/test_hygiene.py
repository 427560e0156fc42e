"""No work outside the three streams, no pageable copy, no wait, no allocation in 50 steps."""

from __future__ import annotations

import pytest
import torch

from replica.device.gpu_trace import record
from tests.gpu.engines import ROWS, bench
from tests.script import submit

STEPS = 50


SHAPED = {
    "temperature": 0.8,
    "min_p": 0.05,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": ((9, 1.0),),
    "logprobs": 5,
}


def decoding(runner, device, sizes, sampling=None, **options):
    """An engine in the middle of decoding six rows."""
    engine, _ = bench(runner, device, sizes, eos_token_ids=(), **options)
    common = {"max_tokens": 150, "ignore_eos": True, **(sampling or {})}
    engine.send(*(submit(str(i), (3, i), **common) for i in range(6)))
    engine.step(12)
    return engine


@pytest.mark.parametrize("sizes", [(ROWS,), ()], ids=["graphs", "eager"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
@pytest.mark.parametrize("sampling", [{}, SHAPED], ids=["greedy", "shaped"])
def test_steady_steps_break_no_rule(runner, device, sizes, overlap, sampling):
    engine = decoding(runner, device, sizes, sampling, overlap=overlap)
    trace = record(device, engine.engine.advance, STEPS)
    assert trace.violations() == []
    assert len(trace.device) > 5 * STEPS
    assert len(trace.lanes) == 3
    assert {event.stream for event in trace.device} == set(trace.lanes)
    engine.run()
    engine.close()


def default_stream(device):
    torch.ones(4, device=device.memory).add_(1)


def item(device):
    flag = torch.ones(1, device=device.memory)
    device.stream("compute").run(flag.item)


def pageable(device):
    device.stream("h2d").run(lambda: torch.ones(4).to(device.memory, non_blocking=True))


def settle(device):
    device.settle()


def allocate(device):
    torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(2**21 * 37))
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (default_stream, "outside the three streams"),
        (item, "a blocking call"),
        (pageable, "a pageable copy"),
        (settle, "a blocking call"),
        (allocate, "an allocation"),
    ],
)
def test_a_planted_fault_is_found(runner, device, plant, words):
    engine = decoding(runner, device, (ROWS,))
    plant(device)  # once unseen: first calls load modules

    def step() -> None:
        engine.engine.advance()
        plant(device)

    found = record(device, step, 10).violations()
    assert any(words in violation for violation in found), found
    engine.run()
    engine.close()


def test_memory_does_not_grow_over_ten_thousand_steps(runner, device):
    engine = decoding(runner, device, (4, ROWS))
    before = torch.cuda.memory_reserved(), device.free_bytes()
    steps = engine.engine.scheduler.num_steps
    while engine.engine.scheduler.num_steps < steps + 10_000:
        number = engine.engine.scheduler.num_steps
        engine.run(*(submit(f"{number}.{i}", (3, i), max_tokens=150) for i in range(5)))
        engine.channel.reports.clear()
    assert (torch.cuda.memory_reserved(), device.free_bytes()) == before
    engine.close()

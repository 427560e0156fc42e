"""What an engine does before it is offered to anybody."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace

import pytest
from torch import Tensor

from replica.config import EngineConfig
from replica.device.stream import HostDevice
from replica.engine import Engine
from replica.process import warm_up
from replica.sampling.sampler import Sampler
from replica.scheduling.batch import Batch
from replica.scheduling.cost_fit import CostFit
from replica.warm_up import Replay, WarmUp
from tests.script import Bench, ScriptRunner, submit

CONFIG = EngineConfig(
    model="test", max_rows=6, max_step_tokens=256, block_size=16, kv_tokens=16384, dtype="float32"
)
CONTEXT = 8192


class TimedRunner(ScriptRunner):
    """Takes a step's time by the book: no clock is asked."""

    def forward(
        self, batch: Batch, input_ids: Tensor, inputs: Mapping[str, Tensor], logits: Tensor
    ) -> None:
        self.batches.append(batch)
        logits.fill_(-10.0)
        logits[:, 10] = 10.0


def warmed(config: EngineConfig = CONFIG, context: int = CONTEXT) -> tuple[CostFit, TimedRunner]:
    runner = TimedRunner()
    engine = Engine(
        replace(config, overlap=False), runner, channel := Replay(), max_model_len=context
    )
    fit = WarmUp(engine, channel).run()
    assert engine.rows.num_used == 0
    assert engine.scheduler.blocks.num_free == config.num_blocks
    engine.pipeline.close()
    return fit, runner


def test_every_way_of_sampling_is_taken_by_itself(monkeypatch):
    """Kernels are compiled for combinations: a mixed batch is one of them only."""
    seen = set()
    sample = Sampler.sample

    def spy(self, batch, inputs, logits, mask):
        seen.add((batch.shaped, batch.held, mask is not None, batch.logprobs))
        return sample(self, batch, inputs, logits, mask)

    monkeypatch.setattr(Sampler, "sample", spy)
    _, runner = warmed()
    shaped_and_masked = {(shaped, mask) for shaped, held, mask, _ in seen if not held}
    assert shaped_and_masked == {(False, False), (False, True), (True, False), (True, True)}
    assert (False, True, False, False) in seen
    assert (False, False, False, True) in seen
    assert any(len(batch.scores) for batch in runner.batches)


def test_every_batch_size_and_depth_that_is_launched_differently_is_taken():
    _, runner = warmed()
    decodes = {len(batch.samples) for batch in runner.batches if batch.decodes_only}
    assert {1, 2, 4, 6} <= decodes
    few = {int(b.starts[0]) for b in runner.batches if b.lengths.tolist() == [2]}
    assert {1024, 2048, 4096} <= few
    chunks = {(int(b.starts[0]), b.num_tokens) for b in runner.batches if len(b.lengths) == 1}
    assert {(0, 256), (0, 4), (CONTEXT // 2, 16)} <= chunks


@pytest.mark.parametrize("context", [1, 2, 8, 9, 20, 40, 1500])
@pytest.mark.parametrize("rows", [1, 3])
def test_contexts_of_any_length_warm_up(context, rows):
    warmed(replace(CONFIG, max_rows=rows, max_step_tokens=max(8, rows)), context)


def test_an_engine_is_gone_with_its_last_reference():
    """Its buffers are hundreds of MiB on a GPU: they must not wait for a collection."""
    gc.disable()
    try:
        bench = Bench(ScriptRunner())
        bench.run(submit("a"))
        bench.close()
        engine = weakref.ref(bench.engine)
        del bench.engine
        bench.at_end = lambda: None
        assert engine() is None
    finally:
        gc.enable()


def test_nothing_of_the_warm_up_is_left():
    engines: list[weakref.ref[Engine]] = []
    made = Engine.__init__

    class Device(HostDevice):
        left = -1

        def give_back(self) -> None:
            self.left = sum(engine() is not None for engine in engines)

    def note(self: Engine, *args, **options) -> None:
        engines.append(weakref.ref(self))
        made(self, *args, **options)

    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", note)
        warm_up(CONFIG, TimedRunner(), CONTEXT, device)
    assert len(engines) == 1
    assert device.left == 0

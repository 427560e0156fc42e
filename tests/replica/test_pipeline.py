"""A pipeline needs batches and nothing else: it may stand in another process than the scheduler."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from replica.device.stream import HostDevice
from replica.io_slot import IOSlot, Sizes
from replica.messages import Abort, Sampling, Submit
from replica.pipeline import Pipeline
from replica.scheduling.batch import Batch, StepOutput
from replica.scheduling.sequence import Bits
from tests.models import EOS_ID, save_tiny
from tests.oracle import decoder_runner, prompts
from tests.script import Bench

BLOCK, BLOCKS, CONTEXT, COUNT = 4, 64, 120, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def runners(folder):
    """Two models of the same weights, each with its own KV pool."""
    return [decoder_runner(folder, BLOCKS, BLOCK) for _ in range(2)]


@dataclass
class Wire:
    """What an engine's pipeline is told, as bytes, and what it brought."""

    batches: list[bytes] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)
    ids: list[list[int]] = field(default_factory=list)

    def tap(self, engine: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        pipeline, fill = engine.engine.pipeline, engine.engine.masks.fill
        launch, collect = pipeline.launch, pipeline.collect

        def launched(batch: Batch | None) -> None:
            if batch is not None:
                self.batches.append(pickle.dumps(batch))
                assert b"Sequence" not in self.batches[-1]
            launch(batch)

        def filled(batch: Batch, bits: Bits) -> None:
            fill(batch, bits)
            self.masks[batch.step] = bits[: len(batch.samples)].tobytes()

        def collected(batch: Batch | None) -> StepOutput | None:
            output = collect(batch)
            if output is not None:
                self.ids.append(output.ids.tolist())
            return output

        monkeypatch.setattr(pipeline, "launch", launched)
        monkeypatch.setattr(pipeline, "collect", collected)
        monkeypatch.setattr(engine.engine.masks, "fill", filled)

    def replay(self, pipeline: Pipeline) -> Iterator[list[int]]:
        """The ids of each step, by a pipeline that is told no more."""

        def fill(batch: Batch, bits: Bits) -> None:
            told = np.frombuffer(self.masks[batch.step], np.uint8)
            bits[: len(batch.samples)] = told.reshape(len(batch.samples), -1)

        for data in self.batches:
            batch, previous = pickle.loads(data), pipeline.in_flight
            pipeline.launch(batch)
            if (output := pipeline.collect(previous)) is not None:
                yield output.ids.tolist()
            pipeline.finish(batch, fill)
        if (output := pipeline.collect(pipeline.in_flight)) is not None:
            yield output.ids.tolist()


def any_sampling(rng: random.Random) -> Sampling:
    """Greedy, drawn, filtered, shaped, masked, held back, with log probabilities."""
    return Sampling(
        max_tokens=rng.randint(1, COUNT),
        min_tokens=rng.choice([0, 0, 3]),
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 40]),
        seed=rng.getrandbits(64),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        logit_bias=rng.choice([(), ((7, 2.0), (9, -3.0))]),
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        stop_token_ids=rng.choice([(), (11, 12, 13)]),
        bad_token_ids=rng.choice([(), (), ((5,), (6, 7))]),
    )


def random_schedule(engine: Bench, rng: random.Random) -> None:
    """Arrivals and aborts at any moment; prompts that begin alike."""
    for number, prompt in enumerate(prompts(rng.randrange(10**6), count=16)):
        sampling = any_sampling(rng)
        engine.send(Submit(request_id=str(number), prompt_ids=prompt, sampling=sampling))
        if rng.random() < 0.2:
            engine.send(Abort(request_id=str(rng.randrange(number + 1))))
        engine.step(rng.randrange(4))
    engine.run()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
def test_who_is_sent_the_batches_alone_computes_the_same_tokens(runners, overlap, monkeypatch):
    """With its own model, KV pool and sampler, which keeps no more than they have told."""
    first, second = runners
    preempted = cached = 0
    for seed in range(8):
        rng, wire = random.Random(seed), Wire()
        engine = Bench(
            first,
            max_model_len=CONTEXT,
            eos_token_ids=(EOS_ID,),
            overlap=overlap,
            max_rows=rng.randint(2, 8),
            max_step_tokens=rng.choice([16, 64]),
            block_size=BLOCK,
            kv_tokens=rng.choice([CONTEXT, BLOCKS * BLOCK]),
        )
        wire.tap(engine, monkeypatch)
        random_schedule(engine, rng)
        stats, rows = engine.engine.stats(), engine.engine.rows
        preempted, cached = preempted + stats.preemptions, cached + stats.cached_tokens
        engine.close()
        sizes = Sizes(
            max_rows=rows.max_rows,
            max_step_tokens=engine.config.max_step_tokens,
            table_width=rows.block_table.shape[1],
            vocab_size=second.vocab_size,
            guard=rows.guard,
            block_size=BLOCK,
        )
        pipeline = Pipeline(second, sizes, HostDevice(), on_idle=IOSlot.poison)
        assert list(wire.replay(pipeline)) == wire.ids, f"schedule {seed}"
        pipeline.close()
    assert preempted
    assert cached

"""Race mode: everything that could be read too late or too early is made to show.

Streams pause at random, idle slots are overwritten, KV blocks without content are full of NaN,
and writes to persistent state off the compute stream are caught. `Plant` breaks the pipeline on
purpose, to prove that each of these would be noticed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replica.device.stream import HostDevice, HostEvent, HostStream, Stream
from replica.io_slot import IOSlot
from replica.messages import Abort, Submit
from replica.model.runner import DecoderRunner
from replica.sampling.sampler import Sampler
from replica.scheduling.batch import Batch
from replica.scheduling.block_manager import BlockManager
from replica.scheduling.sequence import Bits, Constraint, ConstraintFailure, TokenIds
from tests.models import EOS_ID
from tests.script import Bench


class RaceError(AssertionError):
    """A rule about who may touch what, and when, was broken."""


class NaNBlocks(BlockManager):
    """Fills a block with NaN when it loses its content."""

    def __init__(self, runner: DecoderRunner, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._layers = runner.cache.layers

    def release(self, blocks: list[int]) -> None:
        super().release(blocks)
        for block in set(blocks) & set(self._free):
            self._poison(block)

    def _take(self) -> int:
        block = super()._take()
        self._poison(block)  # it may have been evicted
        return block

    def _poison(self, block: int) -> None:
        self._layers[:, block * self.block_size : (block + 1) * self.block_size] = torch.nan


class NotingRunner:
    """Remembers which token went into which slot of the KV pool."""

    def __init__(self, runner: DecoderRunner) -> None:
        self.vocab_size = runner.vocab_size
        self._runner = runner
        self._fed = np.full(runner.cache.layers.shape[1], -1)

    def forward(
        self, batch: Batch, input_ids: Tensor, inputs: Mapping[str, Tensor], logits: Tensor
    ) -> None:
        self._fed[inputs["slot_mapping"][: batch.num_tokens].numpy()] = input_ids.numpy()
        self._runner.forward(batch, input_ids, inputs, logits)

    def check_index(self, blocks: BlockManager) -> None:
        """Every block that a prompt may find holds the tokens that it is found by."""
        for block, content in blocks._content.items():
            ids = np.frombuffer(content.ids, np.int32)
            fed = self._fed[block * blocks.block_size :][: blocks.block_size]
            if not (ids == fed).all():
                raise RaceError(f"block {block} is indexed under {ids} and holds {fed}")


class FailsAt(Constraint):
    """Allows everything, and fails once there are `count` output tokens."""

    def __init__(self, count: int) -> None:
        self._count = count

    def fill(self, output_ids: TokenIds, bits: Bits) -> None:
        if len(output_ids) >= self._count:
            raise ConstraintFailure("as planned")
        bits[:] = 0xFF


class PlannedFailures:
    """Grammars of which each is the number of tokens after which it fails."""

    def constraint(self, grammar: str) -> Constraint:
        return FailsAt(int(grammar))


class GuardedSampler(Sampler):
    """Persistent device state is written on the compute stream only."""

    def admit_rows(self, *args: Any) -> None:
        self._check()
        super().admit_rows(*args)

    def sample(self, *args: Any) -> torch.Tensor:
        self._check()
        ids = super().sample(*args)
        if not bool(((ids >= 0) & (ids < self.vocab_size)).all()):
            raise RaceError("sampled what is no token")
        return ids

    def _check(self) -> None:
        if threading.current_thread().name != "compute":
            raise RaceError(f"persistent state written on {threading.current_thread().name}")


class Pauses:
    """Random delays of up to a few hundred microseconds, now and then far longer."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self) -> None:
        kind = self._random.random()
        if kind < 0.02:
            time.sleep(self._random.random() * 0.01)
        elif kind < 0.5:
            time.sleep(self._random.random() * 0.0004)


def race_bench(runner: DecoderRunner, seed: int, context: int, **options: Any) -> Bench:
    """An engine in race mode over a real model."""
    noting = NotingRunner(runner)
    engine = Bench(
        noting,
        max_model_len=context,
        eos_token_ids=(EOS_ID,),
        device=HostDevice(Pauses(seed)),
        on_idle=IOSlot.poison,
        **{"grammars": PlannedFailures(), **options},
    )
    config = engine.config
    engine.engine.scheduler.blocks = NaNBlocks(
        runner, config.num_blocks, config.block_size, prefix_cache=config.prefix_cache
    )
    engine.at_end = lambda: noting.check_index(engine.engine.scheduler.blocks)
    pipeline = engine.engine.pipeline
    pipeline._sampler = GuardedSampler(config.max_rows, runner.vocab_size)
    runner.cache.layers.fill_(torch.nan)
    for lane in pipeline._lanes:
        lane.slot.poison()
    return engine


def arrivals_and_cancels(
    engine: Bench,
    rng: random.Random,
    asked: Collection[Submit],
    expected: Mapping[str, list[int]],
    count: int,
) -> None:
    """Send `count` of the requests at random moments and cancel some: what comes of each is what
    comes of it alone, up to its end."""
    submits = list(asked)
    for request in rng.sample(submits, count):
        engine.send(request)
        if rng.random() < 0.3:
            engine.send(Abort(request_id=rng.choice(submits).request_id))
        engine.step(rng.randrange(4))
    for name, ids in engine.run().items():
        assert ids == expected[name][: len(ids)]
        assert len(ids) == len(expected[name]) or engine.endings()[name] == "abort"


# Plants: each takes one safeguard away.


class DeafEvent(HostEvent):
    """Nobody waits for it."""

    def block(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


def lose_event(name: str) -> Callable[[Bench], None]:
    """Both slots lose the waits for `name` (h2d_done, compute_done, d2h_done, mask_done)."""

    def plant(engine: Bench) -> None:
        pipeline = engine.engine.pipeline
        stream = {"h2d_done": pipeline._h2d, "compute_done": pipeline._compute}.get(
            name, pipeline._d2h
        )
        assert isinstance(stream, HostStream)
        for lane in pipeline._lanes:
            setattr(lane, name, DeafEvent(stream))

    return plant


def release_early(engine: Bench) -> None:
    """Rows and blocks are released although the step in flight names them."""
    scheduler = engine.engine.scheduler
    retire = scheduler._retire_rows

    def one_step_early() -> None:
        scheduler._collected += 1
        retire()
        scheduler._collected -= 1

    scheduler._retire_rows = one_step_early  # type: ignore[method-assign]


def write_state_from_h2d(engine: Bench) -> None:
    """Row parameters are taken over by the upload, not by the step that uses them."""
    pipeline = engine.engine.pipeline
    launch = pipeline.launch

    def launch_and_write(batch: Any) -> None:
        launch(batch)
        if batch is not None:
            slot = pipeline._lanes[batch.step % 2].slot
            pipeline._h2d.run(lambda: pipeline._sampler.admit_rows(batch, slot.device))
            pipeline._lanes[batch.step % 2].h2d_done.record()
            pipeline._lanes[batch.step % 2].h2d_done.block(pipeline._d2h)
            pipeline._lanes[batch.step % 2].d2h_done.record()

    pipeline.launch = launch_and_write  # type: ignore[method-assign]

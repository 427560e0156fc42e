"""SCRIPT: a fake model with chosen logits per (request, position), at the runner seam.

The test may gate it: then the result of a step is released by the test, which gives every
interleaving of launch, copy, apply and cancel on a CPU. `Bench` drives an engine by hand.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from replica.config import EngineConfig
from replica.engine import Engine
from replica.messages import Command, FinishReason, Output, Sampling, StepReport, Submit
from replica.scheduling.batch import Batch
from replica.scheduling.rows import Rows

VOCAB = 64
EOS = 2

Script = Callable[[str, int], "Tensor | int"]
"""(request id, position of the token to be sampled) -> its logits, or the id to be sampled."""


def counting(request_id: str, position: int) -> int:
    """Ids 10, 11, ... by position: never an end-of-sequence id."""
    return 10 + position % 50


class ScriptRunner:
    """Checks on the way that only real ids reach the model (R01)."""

    def __init__(
        self, script: Script = counting, vocab_size: int = VOCAB, *, gated: bool = False
    ) -> None:
        self.vocab_size = vocab_size
        self.batches: list[Batch] = []
        self.fed: dict[str, dict[int, int]] = defaultdict(dict)
        """Ids that the model was fed: request -> position -> id."""
        self.gate = threading.Semaphore(0 if gated else 2**30)
        self.rows: Rows
        """The engine's, to be set before its first step: who owns which row."""
        self._script = script

    def forward(
        self, batch: Batch, input_ids: Tensor, inputs: Mapping[str, Tensor], logits: Tensor
    ) -> None:
        assert self.gate.acquire(timeout=20), "the test never released this step"
        assert bool(((input_ids >= 0) & (input_ids < self.vocab_size)).all()), input_ids
        self.batches.append(batch)
        ids = iter(input_ids.tolist())
        names = [self.rows.sequence(row).request_id for row in batch.rows.tolist()]
        for name, start, length in zip(
            names, batch.starts.tolist(), batch.lengths.tolist(), strict=True
        ):
            for position in range(start, start + length):
                self.fed[name][position] = next(ids)
        logits.fill_(-10.0)
        for row, index in enumerate(batch.samples.tolist()):
            position = int(batch.starts[index] + batch.lengths[index])
            chosen = self._script(names[index], position)
            if isinstance(chosen, int):
                logits[row, chosen] = 10.0
            else:
                logits[row] = chosen


class ListChannel:
    """Commands from a list, reports into a list."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.reports: list[StepReport] = []

    def receive(self, timeout_s: float) -> Iterable[Command]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, report: StepReport) -> None:
        self.reports.append(report)


def submit(request_id: str, prompt: Iterable[int] = (5, 6, 7), **options: Any) -> Submit:
    """A greedy request unless told otherwise."""
    fields = {"attempt", "prior_output_ids", "cache_salt", "band"} & options.keys()
    envelope = {name: options.pop(name) for name in fields}
    sampling = Sampling(**{"max_tokens": 4, "temperature": 0.0, **options})
    return Submit(request_id=request_id, prompt_ids=tuple(prompt), sampling=sampling, **envelope)


class Bench:
    """An engine on the test's bench, stepped by the test."""

    def __init__(self, runner: Any, *, max_model_len: int = 64, **options: Any) -> None:
        # `device` names a kind of device in the settings, and is one here.
        names = (EngineConfig.__dataclass_fields__.keys() - {"device"}) & options.keys()
        settings = {name: options.pop(name) for name in names}
        self.config = EngineConfig(
            **{"model": "test", "max_rows": 4, "kv_tokens": 512, "block_size": 4, **settings}
        )
        self.channel = ListChannel()
        options.setdefault("eos_token_ids", (EOS,))
        self.engine = Engine(
            self.config, runner, self.channel, max_model_len=max_model_len, **options
        )
        if isinstance(runner, ScriptRunner):
            runner.rows = self.engine.rows
        self._free_blocks = self.engine.scheduler.blocks.num_free
        self.at_end: Callable[[], None] = lambda: None
        """A further check when nothing is left to do."""

    def send(self, *commands: Command) -> None:
        self.channel.commands += commands

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.advance()

    def run(self, *commands: Command, limit: int = 10_000) -> dict[str, list[int]]:
        """Send, step until nothing is left, check that everything was given back."""
        self.send(*commands)
        for _ in range(limit):
            self.step()
            if not self.engine.busy and not self.channel.commands:
                self.check_released()
                self.at_end()
                return self.outputs()
        raise AssertionError(f"still busy after {limit} steps: {self.engine.stats()}")

    @property
    def reported(self) -> list[Output]:
        return [output for report in self.channel.reports for output in report.outputs]

    def outputs(self) -> dict[str, list[int]]:
        """Ids by request; checks that offsets follow each other without gap or repeat."""
        ids: dict[str, list[int]] = {}
        base: dict[str, int] = {}
        for output in self.reported:
            known = ids.setdefault(output.request_id, [])
            offset = base.setdefault(output.request_id, output.offset)
            if output.finish_reason != "error":
                assert output.offset - offset == len(known), output
            known += output.token_ids
        return ids

    def endings(self) -> dict[str, FinishReason]:
        """How each request ended; checks that it did so once and that nothing followed."""
        reasons: dict[str, FinishReason] = {}
        for output in self.reported:
            assert output.request_id not in reasons, f"output after its end: {output}"
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        return reasons

    def check_released(self) -> None:
        engine = self.engine
        assert engine.rows.num_used == 0
        assert not engine.rows.untouched
        assert engine.scheduler.waiting == []
        assert engine.scheduler.blocks.num_free == self._free_blocks
        assert not engine.rows.in_flight.any()
        assert (engine.rows.block_table == engine.rows.guard).all()
        assert not engine.scheduler.has_work

    def close(self) -> None:
        self.engine.pipeline.close()

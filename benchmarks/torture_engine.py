"""An engine of a real shape in this process, driven step by step, with all that it says checked."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES, random_decoder
from benchmarks.torture_checks import Asked, Checks, Record
from replica.config import EngineConfig
from replica.device.stream import Device
from replica.messages import Abort, Command, Sampling, Stats, StepReport, Submit
from replica.model.decoder import Decoder
from replica.model.spec import ModelSpec
from replica.process import assemble, open_device
from replica.scheduling.batch import Batch

EOS = (2, 3)
STALLED_S = 120.0
"""Nothing came for so long although something was asked for."""
MIB = 2**20


class Stalled(Exception):
    """The engine owes answers and brings none."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is started."""

    spec: ModelSpec
    config: EngineConfig


def setting(shape: str, device: str, **options: Any) -> Setting:
    """As it is served on a GPU, or small enough for a CPU. `options` override the engine's."""
    spec = replace(SHAPES[shape], eos_token_ids=EOS)
    if device == "cuda":
        rows = 64 if shape == "llama-8b" else 256
        sizes = {"max_rows": rows, "max_model_len": 131_072, "max_step_tokens": 8192}
        settings: dict[str, Any] = {"dtype": "bfloat16", "block_size": 64, **sizes}
    else:
        spec = replace(spec, vocab_size=min(spec.vocab_size, 4096), tied_embeddings=False)
        sizes = {"max_rows": 16, "max_model_len": 2048, "max_step_tokens": 128}
        settings = {"dtype": "float32", "kv_tokens": 16_384, "step_budget_ms": 20.0, **sizes}
    return Setting(spec, EngineConfig(model="random", device=device, **(settings | options)))  # type: ignore[arg-type]


class CheckedChannel:
    """Commands in, reports through the checks."""

    def __init__(self, checks: Checks) -> None:
        self.commands: list[Command] = []
        self.newest = Stats()
        self._checks = checks

    def receive(self, timeout_s: float) -> Iterable[Command]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, report: StepReport) -> None:
        self.newest = report.stats
        for output in report.outputs:
            self._checks.see(output)


class Driven:
    """Assembled as in an engine's process. `close` it before the next."""

    def __init__(
        self, chosen: Setting, record: Record, device: Device, decoder: Decoder | None = None
    ) -> None:
        """Takes seconds to a minute. decoder: one of that shape, if there is one already."""
        self.record = record
        self.spec = spec = chosen.spec
        with torch.inference_mode():
            dtype = getattr(torch, chosen.config.dtype)
            decoder = decoder or random_decoder(spec, dtype, device.memory)
            self.checks = Checks(
                record, spec.vocab_size, chosen.config.max_model_len or 0, spec.eos_token_ids
            )
            self._channel = CheckedChannel(self.checks)
            self.engine = assemble(chosen.config, decoder, device, self._channel)
        self.config = self.engine.config
        self.exact = self.config.device == "cpu"
        """A greedy answer depends on its prompt alone."""
        self.steps_without_samples = 0
        self._seen, self._since = 0, 0.0
        self._free_blocks = self.engine.scheduler.blocks.num_free
        self.names = map(str, count())
        """Of requests: an engine starts none twice."""
        self._restore = on_compile(record.compiled.append)

    @property
    def stats(self) -> Stats:
        return self._channel.newest

    def ask(self, prompt: tuple[int, ...], **options: Any) -> Asked:
        """Greedily, without an end but `max_tokens`, unless told otherwise."""
        options = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **options}
        name = next(self.names)
        return self.send(Submit(request_id=name, prompt_ids=prompt, sampling=Sampling(**options)))

    def send(self, submit: Submit, *, refused: bool = False, times: int = 1) -> Asked:
        self._channel.commands += [submit] * times
        if not self.checks.alive:
            self._since = time.perf_counter()
        return self.checks.expect(submit, refused=refused)

    def send_overtaken(self, submit: Submit) -> None:
        """Its abort comes first: nothing is ever to be heard of it."""
        self._channel.commands += [Abort(request_id=submit.request_id), submit]

    def abort(self, asked: Asked) -> None:
        asked.aborted = True
        self._channel.commands.append(Abort(request_id=asked.submit.request_id))

    def step(self) -> Batch | None:
        """One turn of the engine. Returns the step that it collected. Raises Stalled."""
        collected = self.engine.pipeline.in_flight
        with torch.inference_mode():
            self.engine.advance()
        if collected is not None:
            self.steps_without_samples += not len(collected.samples)
        self._check_progress()
        return collected

    def step_until(self, over: Callable[[], bool]) -> None:
        while not over():
            self.step()

    def answer(self, prompt: tuple[int, ...], **options: Any) -> Asked:
        """Ask, and step until that is over."""
        asked = self.ask(prompt, **options)
        self.step_until(lambda: asked.reason is not None)
        return asked

    def drain(self) -> None:
        """Until all is over; then nothing may be taken any more."""
        self.step_until(
            lambda: not (self.checks.alive or self._channel.commands or self.engine.busy)
        )
        for complaint in self._left_over():
            self.record.fail(complaint)

    @contextmanager
    def tight(self, tokens: int) -> Iterator[None]:
        """Sequences find room for that many tokens only: the other blocks are somebody's."""
        blocks = self.engine.scheduler.blocks
        held = blocks.allocate(blocks.num_free - blocks.blocks_for(tokens))
        self._free_blocks -= len(held)
        yield
        blocks.release(held)
        self._free_blocks += len(held)

    def close(self) -> None:
        """Even if it has failed."""
        self._restore()
        with suppress(RuntimeError):
            self.engine.pipeline.close()
        gc.unfreeze()

    def _check_progress(self) -> None:
        seen, now = self.record.tokens, time.perf_counter()
        if seen != self._seen or not (self.checks.alive or self.engine.busy):
            self._seen, self._since = seen, now
        elif now - self._since > STALLED_S:
            raise Stalled(
                f"no token for {STALLED_S:.0f} s, {len(self.checks.alive)} requests without an "
                f"end: {self.engine.stats()}"
            )

    def _left_over(self) -> Iterator[str]:
        rows, scheduler = self.engine.rows, self.engine.scheduler
        if rows.num_used or scheduler.waiting or scheduler.has_work:
            yield f"{rows.num_used} rows taken, {len(scheduler.waiting)} waiting at the end"
        if scheduler.blocks.num_free != self._free_blocks:
            yield f"{scheduler.blocks.num_free} blocks free in place of {self._free_blocks}"
        if rows.in_flight.any() or (rows.block_table != rows.guard).any():
            yield "a free row has tokens in flight or blocks"


def start(chosen: Setting, record: Record) -> Driven:
    """On a device of its own."""
    return Driven(chosen, record, open_device(chosen.config))


def on_compile(listener: Callable[[str], None]) -> Callable[[], None]:
    """Hear the name of each kernel that Triton compiles or loads: engines only count them. Returns
    what undoes it."""
    try:
        from triton import knobs
    except ImportError:
        return lambda: None
    before = knobs.runtime.jit_post_compile_hook

    def hook(**about: Any) -> Any:
        listener(str(about.get("repr")))
        return None if before is None else before(**about)

    def restore() -> None:
        knobs.runtime.jit_post_compile_hook = before

    knobs.runtime.jit_post_compile_hook = hook
    return restore


def memory_mib(device: str) -> float:
    """Held by anybody on the GPU, or taken of the host by this process. What torch keeps for later
    on a GPU is nobody's: see `excess_mib`."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return (total - free - kept) / MIB
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / MIB


def excess_mib(config: EngineConfig) -> float:
    """Of the GPU's memory, taken beyond the share that the engine may take."""
    if config.device != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return max(0.0, (total - free - total * config.memory_fraction) / MIB)


def unheld_mib() -> float:
    """Give back to the GPU what nobody holds. How much that was."""
    reserved = torch.cuda.memory_reserved()
    gc.collect()
    torch.cuda.empty_cache()
    return (reserved - torch.cuda.memory_reserved()) / MIB

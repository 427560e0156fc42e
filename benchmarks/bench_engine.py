"""An engine in this process, driven step by step, and what a window of its steps cost."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from replica.config import EngineConfig
from replica.device.cuda import CudaDevice, CudaRecorder
from replica.device.graph_pool import GraphPool
from replica.engine import Engine
from replica.messages import (
    Command,
    Sampling,
    Stats,
    StepReport,
    Submit,
    decode_event,
    encode,
)
from replica.model.decoder import Decoder
from replica.model.gpu.tuning import tune
from replica.model.runner import DecoderRunner
from replica.process import collect_rarely
from replica.sampling.masks import MakesConstraints

BLOCK = 64
MODES = {"on": True, "off": False}
"""Overlap."""
Held: TypeAlias = tuple[int, str]
"""The first so many requests are held to a grammar, and to which."""
EDGE = 8
"""Steps at either end of a window that are not counted."""


class Recorder:
    """A channel that feeds commands and keeps what comes back, in the form in which an engine's
    process sends it: as objects it would pile up, and each new page of memory is host time."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.newest = Stats()
        self.sent: list[bytes] = []

    def receive(self, timeout_s: float) -> Iterable[Command]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, report: StepReport) -> None:
        self.newest = report.stats
        self.sent.append(encode(report))

    def reports(self) -> Iterator[StepReport]:
        for data in self.sent:
            report = decode_event(data)
            assert isinstance(report, StepReport)
            yield report

    def tokens(self) -> list[list[int]]:
        """Of each request, in the order of their first tokens."""
        found: dict[str, list[int]] = defaultdict(list)
        for report in self.reports():
            for output in report.outputs:
                found[output.request_id] += output.token_ids
        return list(found.values())


@dataclass(frozen=True, slots=True)
class Window:
    """Steps in which all rows decoded."""

    steps: int
    step_ms: float
    bubble_share: float
    """Of wall time."""
    host_ms: float
    """CPU time of the step loop, per step."""
    wall_s: float
    """Of the whole run, prompts included."""
    cpu_share: float
    """CPU time of the process over wall time: 1 is one core."""
    tokens: list[list[int]]


class BenchEngine:
    """A decoder, an engine over it, and its graphs."""

    def __init__(
        self,
        config: EngineConfig,
        runner: DecoderRunner,
        max_model_len: int,
        device: CudaDevice,
        grammars: MakesConstraints | None = None,
    ) -> None:
        self.channel = Recorder()
        self.graphs = GraphPool(CudaRecorder(device), (config.max_rows,), device.free_bytes)
        self._runs = 0
        self.engine = Engine(
            config,
            runner,
            self.channel,
            max_model_len=max_model_len,
            device=device,
            graphs=self.graphs,
            grammars=grammars,
        )
        self.engine.pipeline.capture()

    def submit(
        self, prompt_tokens: int, tokens: int, held: Held = (0, ""), *, seed: int = 0
    ) -> int:
        """One greedy request per row, prompts at random. Returns all prompt tokens."""
        rows, random = self.engine.rows.max_rows, np.random.default_rng(seed)
        for row in range(rows):
            prompt = tuple(random.integers(0, 50_000, prompt_tokens).tolist())
            grammar = held[1] if row < held[0] else ""
            sampling = Sampling(max_tokens=tokens, temperature=0.0, grammar=grammar)
            name = f"{self._runs}.{row}"
            self.channel.commands.append(
                Submit(request_id=name, prompt_ids=prompt, sampling=sampling)
            )
        self._runs += 1
        return rows * prompt_tokens

    def prefill(self, prompt_tokens: int) -> None:
        """Step until so many prompt tokens were computed since the engine's start."""
        while self.channel.newest.prompt_tokens < prompt_tokens:
            self.engine.advance()

    def run(self, prompt_tokens: int, tokens: int, held: Held = (0, "")) -> Window:
        """All rows at once, to the end."""
        self.channel.sent.clear()
        before = self.engine.scheduler.counts["prompt_tokens"]
        began, cpu_s = time.perf_counter(), time.process_time()
        total = before + self.submit(prompt_tokens, tokens, held)
        self.engine.advance()
        while self.engine.busy:
            self.engine.advance()
        wall_s = time.perf_counter() - began
        cpu_share = (time.process_time() - cpu_s) / wall_s
        stats = [report.stats for report in self.channel.reports()]
        decoding = [s for s in stats if s.prompt_tokens == total][EDGE:-EDGE]
        return self._window(decoding[0], decoding[-1], wall_s, cpu_share)

    def _window(self, first: Stats, last: Stats, wall_s: float, cpu_share: float) -> Window:
        steps = last.steps - first.steps
        passed = last.time.since(first.time)
        return Window(
            steps=steps,
            step_ms=passed.total / steps * 1e3,
            bubble_share=passed.bubble / passed.total,
            host_ms=(last.host_s - first.host_s) / steps * 1e3,
            wall_s=wall_s,
            cpu_share=cpu_share,
            tokens=self.channel.tokens(),
        )


def engine_config(rows: int, longest: int, *, overlap: bool) -> EngineConfig:
    blocks = rows * (-(-longest // BLOCK) + 1)
    return EngineConfig(
        model="random",
        device="cuda",
        max_rows=rows,
        max_model_len=longest,
        kv_tokens=blocks * BLOCK,
        block_size=BLOCK,
        max_step_tokens=8192,
        prefix_cache=False,
        overlap=overlap,
    )


@contextmanager
def engines(
    decoder: Decoder,
    device: CudaDevice,
    rows: int,
    longest: int,
    modes: list[str],
    grammars: MakesConstraints | None = None,
) -> Iterator[dict[str, BenchEngine]]:
    """One engine per mode over one KV pool: they run in turn."""
    configs = {mode: engine_config(rows, longest, overlap=MODES[mode]) for mode in modes}
    first = configs[modes[0]]
    tune(decoder, rows, device, first.cache_dir)
    runner = DecoderRunner(decoder, first.num_blocks, first.block_size)
    made = {
        mode: BenchEngine(config, runner, longest, device, grammars)
        for mode, config in configs.items()
    }
    collect_rarely()
    yield made
    gc.unfreeze()
    del made, runner
    gc.collect()
    torch.cuda.empty_cache()

"""What a GPU does in decode steps and in steps with prompt chunks, with overlap and without it.

One engine in this process, random weights, and a load like chat's: as many answers at a time as
there are rows, and a new prompt for each that ends. Bubbles are the engine's own measure. Beside
them the share of a step in which no kernel runs: how long kernels ran is taken from a trace, and
how long the step took from steps that nobody traced, since a profiler makes launches slower.

`--draw TRACE PICTURE` makes an SVG picture of a trace, and nothing else.
"""

from __future__ import annotations

import gc
import gzip
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.report import Report, parser
from benchmarks.shapes import SHAPES, random_decoder
from benchmarks.timeline_picture import draw, read
from benchmarks.torture_engine import setting
from replica.device.stream import Device
from replica.engine import Engine
from replica.messages import Command, Sampling, Stats, StepReport, Submit, Trace, Traced
from replica.process import assemble, open_device
from replica.scheduling.batch import Batch
from replica.timeline.engine_trace import PROFILE
from replica.timeline.make import make, write
from replica.timeline.shares import Shares
from replica.tracer import Tracer

MODES = {"on": True, "off": False}
"""Overlap."""
SETTLE = 3
"""Windows of steps before the first that counts: answers are to end at different times."""
BLOCK = 64
Kinds = dict[str, Shares]


class Chat:
    """A channel whose clients keep so many answers open."""

    def __init__(self, rows: int, prompt: int, answer: int) -> None:
        """prompt, answer: their longest, in tokens; the shortest are an eighth of that."""
        self.newest = Stats()
        self.traced: list[Traced] = []
        self.orders: list[Command] = []
        self._rows, self._prompt, self._answer = rows, prompt, answer
        self._open, self._sent = 0, 0
        self._random = np.random.default_rng(0)

    def receive(self, timeout_s: float) -> Iterable[Command]:
        commands, self.orders = self.orders, []
        commands += [self._submit() for _ in range(self._rows - self._open)]
        self._open = self._rows
        return commands

    def send(self, report: StepReport) -> None:
        self.newest = report.stats
        self.traced += report.traced
        self._open -= sum(output.finish_reason is not None for output in report.outputs)

    def _submit(self) -> Submit:
        self._sent += 1
        length = self._random.integers(self._prompt // 8, self._prompt + 1)
        ids = tuple(self._random.integers(10, 1000, length).tolist())
        # The first ones end at any time, as if they had begun at any time.
        least = 1 if self._sent <= self._rows else self._answer // 8
        tokens = int(self._random.integers(least, self._answer + 1))
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return Submit(request_id=str(self._sent), prompt_ids=ids, sampling=sampling)


class Meter(Tracer):
    """Knows, too, how long steps of each kind took when nobody traced, and how long it takes to
    begin and to end a trace."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.kinds: Kinds = {}
        self.steps = 0
        self.longest_s = {"start": 0.0, "end": 0.0}
        self._bubble_ns = 0

    def clear(self) -> None:
        self.kinds, self.steps = {}, 0

    def start(self, trace: Trace, step: int, bubble_ns: int) -> None:
        began = time.perf_counter()
        super().start(trace, step, bubble_ns)
        self.longest_s["start"] = time.perf_counter() - began

    def end_turn(self) -> None:
        began = time.perf_counter()
        super().end_turn()
        self.longest_s["end"] = max(self.longest_s["end"], time.perf_counter() - began)

    def computed(
        self, batch: Batch, intervals: list[tuple[int, int]], bubble_ns: int, *, replayed: bool
    ) -> None:
        super().computed(batch, intervals, bubble_ns, replayed=replayed)
        step_us = sum(end - start for start, end in intervals) / 1e3
        bubble_us, self._bubble_ns = (bubble_ns - self._bubble_ns) / 1e3, bubble_ns
        kind = "decode" if batch.decodes_only else "mixed"
        self.kinds.setdefault(kind, Shares()).add(Shares(1, step_us, 0.0, bubble_us))
        self.steps += 1


class Bench:
    """One engine under that load."""

    def __init__(self, chosen: Namespace, mode: str) -> None:
        longest = chosen.prompt + chosen.answer + BLOCK
        made = setting(
            chosen.shape,
            chosen.device,
            max_rows=chosen.rows,
            max_model_len=longest,
            kv_tokens=chosen.rows * -(-longest // BLOCK) * BLOCK,
            prefix_cache=False,
            overlap=MODES[mode],
        )
        self.name = f"{chosen.shape}, overlap {mode}"
        self.chat = Chat(chosen.rows, chosen.prompt, chosen.answer)
        device = open_device(made.config)
        decoder = random_decoder(made.spec, getattr(torch, made.config.dtype), device.memory)
        self.engine: Engine = assemble(made.config, decoder, device, self.chat)
        self.meter = self.engine.tracer = Meter(device)

    def run(self, steps: int) -> tuple[Kinds, float]:
        """So many steps. Returns what became of their time, and output tokens per second."""
        self.meter.clear()
        before, began = self.chat.newest.output_tokens, time.perf_counter()
        while self.meter.steps < steps:
            self.engine.advance()
        seconds = time.perf_counter() - began
        return self.meter.kinds, (self.chat.newest.output_tokens - before) / seconds

    def trace(self, steps: int, folder: Path) -> dict[str, Any]:
        """A timeline of so many steps. Raises what `make` raises."""
        self.chat.orders.append(Trace(folder=str(folder), steps=steps, seconds=20.0))
        while not self.chat.traced:
            self.engine.advance()
        if self.chat.traced[0].outcome != "written":
            raise ValueError("the engine has written no trace; see above")
        return make(folder, self.name)

    def close(self) -> None:
        """Let the next one have the memory."""
        self.engine.pipeline.close()
        del self.engine, self.meter
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(report: Report, chosen: Namespace, mode: str) -> None:
    """Without a trace first: once the profiler has run in a process, calls of CUDA take longer."""
    bench = Bench(chosen, mode)
    bench.run(SETTLE * chosen.steps)
    windows = [bench.run(chosen.steps) for _ in range(chosen.runs)]
    for kind in sorted(set().union(*(kinds for kinds, _ in windows))):
        told = [kinds[kind].told() for kinds, _ in windows if kind in kinds]
        report.add(f"step_ms.{kind}.{mode}", [one["ms"] for one in told])
        report.add(f"bubble_share.{kind}.{mode}", [one["bubble"] for one in told])
    report.add(f"bubble_share.{mode}", [_all(kinds).told()["bubble"] for kinds, _ in windows])
    report.add(f"mixed_steps_share.{mode}", [_mixed(kinds) for kinds, _ in windows])
    report.add(f"tokens_per_s.{mode}", [rate for _, rate in windows])
    untraced: Kinds = {}
    for kinds, _ in windows:
        for kind, one in kinds.items():
            untraced.setdefault(kind, Shares()).add(one)
    with tempfile.TemporaryDirectory() as folder:
        try:
            add_traced(report, bench, chosen, mode, untraced, Path(folder))
        except (OSError, ValueError, msgspec.MsgspecError):
            traceback.print_exc()
            keep(Path(folder), chosen.traces, mode)
    bench.close()


def add_traced(
    report: Report, bench: Bench, chosen: Namespace, mode: str, untraced: Kinds, folder: Path
) -> None:
    timeline = bench.trace(chosen.traced, folder)
    shares = timeline["otherData"]["shares"]
    for kind, one in untraced.items():
        traced = _told_of(shares, kind)
        if not traced["steps"]:
            continue
        kernels_us = traced["kernels_us"] / traced["steps"]
        step_us = one.step_us / one.steps
        report.add(f"no_kernel_share.{kind}.{mode}", [max(0.0, 1 - kernels_us / step_us)])
        traced_us = traced["step_us"] / traced["steps"]
        report.add(f"no_kernel_share_traced.{kind}.{mode}", [1 - kernels_us / traced_us])
    for moment, seconds in bench.meter.longest_s.items():
        report.add(f"trace_{moment}_s.{mode}", [seconds])
    after, _ = bench.run(chosen.steps)
    for kind, one in after.items():
        report.add(f"step_ms_after_trace.{kind}.{mode}", [one.told()["ms"]])
    print("hazards:", *(timeline["otherData"]["hazards"] or ["none"]), sep="\n  ")
    if chosen.traces:
        chosen.traces.mkdir(parents=True, exist_ok=True)
        write(timeline, chosen.traces / f"timeline-{mode}.json.gz")
        (chosen.traces / f"timeline-{mode}.svg").write_text(draw(timeline))


def keep(folder: Path, traces: Path | None, mode: str) -> None:
    """What no timeline could be made of."""
    for path in folder.iterdir() if traces else ():
        assert traces is not None
        traces.mkdir(parents=True, exist_ok=True)
        suffix = ".gz" if path.name == PROFILE else ""
        data = gzip.compress(path.read_bytes(), 6) if suffix else path.read_bytes()
        (traces / f"{mode}-{path.name}{suffix}").write_bytes(data)


def _all(kinds: Kinds) -> Shares:
    every = Shares()
    for one in kinds.values():
        every.add(one)
    return every


def _mixed(kinds: Kinds) -> float:
    return kinds.get("mixed", Shares()).steps / _all(kinds).steps


def _told_of(shares: dict[str, dict[str, float]], kind: str) -> dict[str, float]:
    """Of decode or mixed steps, by graph or not. In microseconds."""
    found = {"steps": 0.0, "step_us": 0.0, "kernels_us": 0.0}
    for name, one in shares.items():
        if name.startswith(kind):
            total = one["ms"] * 1e3 * one["steps"]
            found["steps"] += one["steps"]
            found["step_us"] += total * (one["kernels"] + one["gaps"])
            found["kernels_us"] += total * one["kernels"]
    return found


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parser("timeline", __doc__)
    options.add_argument("--shape", choices=list(SHAPES), default="llama-1b")
    options.add_argument("--device", choices=["cuda", "cpu"], default=device)
    options.add_argument("--rows", type=int, default=64, help="answers at a time")
    options.add_argument("--prompt", type=int, default=768, help="longest, in tokens")
    options.add_argument("--answer", type=int, default=384, help="longest, in tokens")
    options.add_argument("--steps", type=int, default=400, help="of one run")
    options.add_argument("--traced", type=int, default=200, help="steps")
    options.add_argument("--traces", type=Path, metavar="FOLDER", help="for traces and pictures")
    options.add_argument("--draw", type=Path, nargs=2, metavar=("TRACE", "PICTURE"))
    chosen = options.parse_args(arguments)
    if chosen.draw:
        trace, picture = chosen.draw
        picture.write_text(draw(read(trace)))
        return
    report = Report("timeline")
    for mode in MODES:
        measure(report, chosen, mode)
    report.write(chosen.json)


if __name__ == "__main__":
    main()

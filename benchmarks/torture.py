"""An engine of a real shape, with random weights, under what tests of tiny models never do.

Starts with caches in any state, prompts of every critical length, random traffic of all
parameters with and without room, a stream beside a long prompt, and the cost model against real
steps, in rounds until the time is over. Every answer is checked, and so is what is left behind.
Ends with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.report import Report
from benchmarks.shapes import SHAPES
from benchmarks.torture_checks import Record
from benchmarks.torture_engine import Driven, excess_mib, memory_mib, setting, start, unheld_mib
from benchmarks.torture_phases import PHASES
from benchmarks.torture_start import starts

ROUND_S = 120.0
MAX_GROWTH_MIB = 256.0
"""Of memory, from the end of the first phase on."""
MAX_EXCESS_MIB = 1024.0
"""Of the GPU's memory, beyond the engine's share: the plan leaves out what fragments."""
MAX_UNHELD_MIB = 32.0
"""Of memory that a start may leave to nobody."""
MAX_GAP_OVER_BUDGET = 1.5
MAX_COST_ERROR = 0.2
"""Both hold of a GPU: a CPU is shared with others, who take time from any step."""
LAUNCH_NOISE = 0.02
"""Of the step budget: most chunks of llama-1b last as long as their launches, 6 ms, which the host
now and then takes 3 ms more for. A miss of so much is none: no stream notices."""


class Torture:
    """Phases in turn over one engine, which is started anew if it has ended."""

    def __init__(self, asked: argparse.Namespace, record: Record, **options: Any) -> None:
        """options: of the engine."""
        self.record = record
        self.growth_mib = 0.0
        self._asked = asked
        self._phases = {name: PHASES[name] for name in asked.phases if name in PHASES}
        self._setting = setting(asked.shape, asked.device, **options)
        self._driven: Driven | None = None
        self._first_mib: float | None = None

    @property
    def budget_ms(self) -> float:
        return self._setting.config.step_budget_ms or float("inf")

    def run(self, until: float) -> None:
        """Rounds up to a time (`time.perf_counter`), one at least, while it is worth it."""
        number = 0
        shares = sum(share for _, share in self._phases.values())
        while shares and (not number or (time.perf_counter() < until and not self.record.full)):
            seconds = min(ROUND_S, max(0.0, until - time.perf_counter()))
            for name, (_, share) in self._phases.items():
                self._run_phase(number, name, seconds * share / shares)
            number += 1
        self._close()

    def _run_phase(self, number: int, name: str, seconds: float) -> None:
        record = self.record
        record.phase = f"round {number}, {name}"
        random = Random(f"{record.seed} {number} {name}")
        began = time.perf_counter()
        try:
            self._driven = self._driven or self._start()
            PHASES[name][0](self._driven, random, time.perf_counter() + seconds)
            self._check_memory()
        except Exception as error:
            traceback.print_exc()
            record.fail(f"the engine ended: {type(error).__name__}: {error}")
            self._close()
        took_s = time.perf_counter() - began
        print(f"{record.phase}: {took_s:.0f} s, {record.num_failures} failures", flush=True)

    def _start(self) -> Driven:
        unheld_mib()  # of an engine before this one
        driven = start(self._setting, self.record)
        left = unheld_mib()
        if left > MAX_UNHELD_MIB:
            self.record.fail(f"{left:.0f} MiB of the start's memory belonged to nobody")
        return driven

    def _check_memory(self) -> None:
        taken = memory_mib(self._asked.device)
        if self._first_mib is None:
            self._first_mib = taken
        grown = taken - self._first_mib
        self.growth_mib = max(self.growth_mib, grown)
        if grown > MAX_GROWTH_MIB:
            self.record.fail(f"memory has grown by {grown:.0f} MiB")
        if (excess := excess_mib(self._setting.config)) > MAX_EXCESS_MIB:
            self.record.fail(f"{excess:.0f} MiB of memory beyond the engine's share are taken")

    def _close(self) -> None:
        """Another engine, if there is one, takes and compiles what it needs anew."""
        if self._driven is not None:
            self._driven.close()
        self._driven = self._first_mib = None

    def judge(self) -> None:
        """What only the whole run can tell."""
        record, figures = self.record, self.figures()
        record.phase = "whole run"
        if record.compiled:
            record.fail(f"compiled after the start: {sorted(set(record.compiled))}")
        if self._asked.device == "cuda":
            if record.costs:
                errors = record.cost_errors(LAUNCH_NOISE * self.budget_ms)
                figures["cost_model_error_p90"] = float(np.quantile(errors, 0.9))
            bounds = {
                "longest_gap_over_budget": MAX_GAP_OVER_BUDGET,
                "cost_model_error_p90": MAX_COST_ERROR,
            }
            for name, bound in bounds.items():
                if figures.get(name, 0.0) > bound:
                    record.fail(f"{name} is {figures[name]:.3g}, at most {bound} is right")

    def figures(self) -> dict[str, float]:
        record = self.record
        figures = {
            "failures": record.num_failures,
            "compiled_after_start": len(record.compiled),
            "requests": record.requests,
            "tokens": record.tokens,
            "preemptions": record.preemptions,
            "memory_growth_mib": self.growth_mib,
        }
        if record.gaps_ms:
            longest = max(record.gaps_ms)
            figures |= {
                "longest_gap_ms": longest,
                "longest_gap_over_budget": longest / self.budget_ms,
            }
        if record.costs:
            figures["cost_model_error_p90"] = float(np.quantile(record.cost_errors(), 0.9))
            figures["cost_model_steps"] = len(record.costs)
        return figures


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _options().parse_args(arguments)
    began = time.perf_counter()
    until, record = began + asked.minutes * 60, Record(asked.seed)
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        options = {}
        if "starts" in asked.phases:
            caches = starts(asked.shape, asked.device, Path(folder), record)
            options["cache_dir"] = str(caches)
        torture = Torture(asked, record, **options)
        torture.run(until)
    torture.judge()
    report = Report("torture")
    report.add("minutes", [(time.perf_counter() - began) / 60])
    for name, value in torture.figures().items():
        report.add(name, [value])
    report.write(asked.json)
    print("\n".join(record.failures))
    return int(record.num_failures > 0)


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.torture",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = ["starts", *PHASES]
    options.add_argument("--shape", choices=list(SHAPES), default="llama-1b")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--minutes", type=float, default=60.0, help="starts included")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--phases", nargs="+", choices=names, default=names)
    options.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    return options


if __name__ == "__main__":
    sys.exit(main())

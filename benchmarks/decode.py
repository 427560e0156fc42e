"""Decode steps against the memory's limit: milliseconds per step, by batch and mean context.

Random weights in bfloat16, greedy, all rows decode together. The floor is what the step's bytes
take at the memory's nominal speed. `--breakdown` adds where a step's time goes, by torch's
profiler, which slows steps: read shares there, and times in the table.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict

import torch

from benchmarks.bench_engine import engines
from benchmarks.decode_cases import Case, cases, options
from benchmarks.overlap import PROFILED, traced
from benchmarks.report import Report
from benchmarks.shapes import SHAPES, floor_ms, random_decoder
from replica.device.cuda import CudaDevice
from replica.model.decoder import Decoder
from replica.timeline.profile import Profile

GROUPS = {
    "products": ("_product", "gemm", "cutlass", "nvjet", "splitK", "cublas"),
    "attention": ("_attend", "_merge"),
    "rotation and cache": ("_rotate_and_store",),
    "norms": ("_add_norm",),
    "activation": ("_silu",),
    "copies": ("Memcpy", "Memset"),
}


def group_of(kernel: str) -> str:
    for group, words in GROUPS.items():
        if any(word in kernel for word in words):
            return group
    return "sampling and small kernels"


def breakdown(trace: Profile) -> dict[str, float]:
    """Microseconds per step by group. Kernels that overlap are not counted twice: each gets the
    time by which it ended later than all before it."""
    found: dict[str, float] = defaultdict(float)
    until = trace.device[0].ts
    for event in sorted(trace.device, key=lambda event: event.end):
        found[group_of(event.name)] += event.end - max(until, event.ts)
        found["idle"] += max(0.0, event.ts - until)
        until = event.end
    ranked = sorted(found.items(), key=lambda pair: -pair[1])
    return {group: us / PROFILED for group, us in ranked}


def measure(report: Report, decoder: Decoder, device: CudaDevice, case: Case, runs: int) -> None:
    with engines(decoder, device, case.rows, case.prompt + case.steps, ["on"]) as made:
        windows = [made["on"].run(case.prompt, case.steps) for _ in range(runs)]
    floor = floor_ms(decoder.spec, case.rows, case.context)
    step = report.add(f"decode_ms.{case.name}", [w.step_ms for w in windows])
    report.add(f"floor_ms.{case.name}", [floor])
    report.add(f"floor_share.{case.name}", [floor / step])
    report.add(f"host_ms.{case.name}", [w.host_ms for w in windows])
    report.add(f"bubble_share.{case.name}", [w.bubble_share for w in windows])


def print_breakdown(decoder: Decoder, device: CudaDevice, case: Case) -> None:
    with engines(decoder, device, case.rows, case.prompt + 4 * PROFILED, ["on"]) as made:
        found = breakdown(traced(made["on"], device, case.prompt))
    print(case.name)
    for group, us in found.items():
        print(f"    {group:<28} {us:>9.1f} us")


def start_s(shape: str, cache_dir: str) -> float:
    """Seconds from the start of an engine's process until it is ready."""
    command = [sys.executable, "-m", "benchmarks.start", shape, cache_dir]
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    print(finished.stdout, end="")
    return float(finished.stdout.split()[-1])


@torch.inference_mode()
def main() -> None:
    asked = options("decode", __doc__)
    asked.add_argument("--breakdown", action="store_true", help="also profile a window")
    asked.add_argument("--starts", action="store_true", help="also time cold and warm starts")
    chosen = asked.parse_args()
    report = Report("decode")
    if chosen.starts:
        with tempfile.TemporaryDirectory() as folder:
            report.add("cold_start_s", [start_s(chosen.shape, folder)])
            report.add("warm_start_s", [start_s(chosen.shape, folder) for _ in range(chosen.runs)])
    device = CudaDevice()
    decoder = random_decoder(SHAPES[chosen.shape], torch.bfloat16, device.memory)
    for case in cases(chosen):
        measure(report, decoder, device, case, chosen.runs)
    # Last: once the profiler has run in a process, each call of CUDA takes longer.
    for case in cases(chosen) if chosen.breakdown else ():
        print_breakdown(decoder, device, case)
    report.write(chosen.json)


if __name__ == "__main__":
    main()

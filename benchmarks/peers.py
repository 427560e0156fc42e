"""Decode steps of this engine and of transformers' continuous batching, side by side on one GPU.

The same shape, random weights in bfloat16, greedy. Each system runs in a process of its own, so
that none measures with another's memory or threads. The comparison holds if transformers was as
fast as it is known to be on an H200: it is checked, and said.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.decode_cases import cases, options
from benchmarks.report import Report

MODULES = {"ours": "decode", "transformers_cb": "transformers_gpu_peer"}
KNOWN_SHAPE, KNOWN_CASE, KNOWN_MS = "llama-8b", "32x4096", 11.99
"""transformers 5.17 on an H200, measured apart from this benchmark."""
TOLERANCE = 0.05


def measure(module: str, arguments: list[str]) -> dict[str, float]:
    """Figures of another benchmark, in its own process. Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(path)]
        subprocess.run(command, check=True)
        figures: dict[str, float] = json.loads(path.read_text())["figures"]
    return figures


def verdict(peer_ms: float) -> str:
    off = peer_ms / KNOWN_MS - 1
    held = "VALID" if abs(off) <= TOLERANCE else "NOT VALID"
    return (
        f"{held}: transformers_cb took {peer_ms:.2f} ms at {KNOWN_CASE}, where {KNOWN_MS} ms is "
        f"known: {off:+.1%}, at most {TOLERANCE:.0%} either way"
    )


def main() -> None:
    chosen = options("peers", __doc__).parse_args()
    names = [case.name for case in cases(chosen)]
    arguments = ["--shape", chosen.shape, "--cases", chosen.cases]
    arguments += ["--steps", str(chosen.steps), "--runs", str(chosen.runs)]
    report = Report("peers")
    for system, module in MODULES.items():
        print(f"{system}:", flush=True)
        figures = measure(module, arguments)
        for name in names:
            report.figures[f"decode_ms.{name}.{system}"] = figures[f"decode_ms.{name}"]
    print(f"{'decode step, ms':<16}" + "".join(f"{system:>18}" for system in MODULES))
    for name in names:
        row = [report.figures[f"decode_ms.{name}.{system}"] for system in MODULES]
        print(f"{name:<16}" + "".join(f"{step_ms:>18.3f}" for step_ms in row))
    if chosen.shape == KNOWN_SHAPE and KNOWN_CASE in names:
        print(verdict(report.figures[f"decode_ms.{KNOWN_CASE}.transformers_cb"]))
    report.write(chosen.json)


if __name__ == "__main__":
    main()

"""What every benchmark command shares: options, progress, a table, and the JSON result.

`figures` is flat: dotted keys, numbers, units in the key. Each is a median of at least three
runs unless its key says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VERSIONS = ("torch", "transformers", "ray", "triton", "fairstream")


@dataclass
class Report:
    """Collects figures, prints them, and writes the result file."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)

    def add(self, key: str, values: Iterable[float]) -> float:
        """Record the median of several runs; prints it with the spread."""
        runs = sorted(values)
        median = statistics.median(runs)
        self.figures[key] = median
        spread = f"{runs[0]:.4g} to {runs[-1]:.4g}, {len(runs)} runs"
        print(f"{key:<44} {median:>12.4g}   ({spread})", flush=True)
        return median

    def keep(self, path: Path | None) -> None:
        """Take over what a file has of figures that were not measured now."""
        if path is not None and path.exists():
            self.figures = json.loads(path.read_text())["figures"] | self.figures

    def write(self, path: Path | None) -> None:
        """`path` None: print only."""
        if path is None:
            return
        result = {
            "name": self.name,
            "date": date.today().isoformat(),
            "machine": machine(),
            "versions": versions(),
            "command": command(),
            "figures": {key: float(f"{value:.5g}") for key, value in self.figures.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """`python -m benchmarks.NAME [options] [--json FILE]`."""
    options = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    options.add_argument("--runs", type=int, default=3, help="repetitions; medians are reported")
    return options


def repeat(runs: int, measure: Callable[[], float]) -> list[float]:
    return [measure() for _ in range(runs)]


def command() -> str:
    module = Path(sys.argv[0]).stem
    return shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """Processor, cores, and the GPU if there is one."""
    words = [_processor(), f"{os.cpu_count()} cores"]
    import torch

    if torch.cuda.is_available():
        words.append(torch.cuda.get_device_name())
    return ", ".join(words)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()

"""Starts in processes of their own, with a folder of caches in any state.

`python -m benchmarks.torture_start SHAPE DEVICE FOLDER` starts one engine and has it answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.torture_checks import Record

TIMEOUT_S = 600


def starts(shape: str, device: str, folder: Path, record: Record) -> Path:
    """With no caches, then with what earlier starts left there, spoilt in every way. Returns a
    folder for the caches of a start that is to succeed: that one, if all have."""
    record.phase = "starts"
    caches = folder / "caches"
    problems = []
    for name, spoil in SPOILT.items():
        spoil(caches)
        if problem := try_start(shape, device, caches):
            problems.append(f"no start with a folder of caches that is {name}: {problem}")
    for problem in problems:
        record.fail(problem)
    return folder / "others" if problems else caches


def try_start(shape: str, device: str, folder: Path) -> str:
    """Why no engine starts and answers; empty if one does."""
    command = [sys.executable, "-m", "benchmarks.torture_start", shape, device, str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()[-3:]
        return f"exit status {error.returncode}, {' / '.join(lines)}"
    except subprocess.TimeoutExpired:
        return f"not within {TIMEOUT_S} s"
    return ""


def empty(folder: Path) -> None:
    """A folder that is not there yet."""


def stale(folder: Path) -> None:
    """As of a version that had other names for its fields."""
    for path in folder.glob("*.json"):
        path.write_text(json.dumps(_renamed(json.loads(path.read_text()))))


def corrupt(folder: Path) -> None:
    """As after a full disk, or a fault of it: every other file ends early, the rest is noise."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for number, path in enumerate(files):
        content = path.read_bytes()
        path.write_bytes(b"\xff\x00noise" * 100 if number % 2 else content[: len(content) // 2])


SPOILT: dict[str, Callable[[Path], None]] = {
    "empty": empty,
    "stale": stale,
    "corrupt": corrupt,
}


def _renamed(value: Any, depth: int = 0) -> Any:
    """Below the first level, whose keys say what a value belongs to."""
    if not isinstance(value, dict):
        return value
    prefix = "old_" if depth else ""
    return {prefix + key: _renamed(inner, depth + 1) for key, inner in value.items()}


def main() -> None:
    from benchmarks.torture_engine import setting, start

    shape, device, folder = sys.argv[1:]
    record = Record(seed=0, phase="start")
    driven = start(setting(shape, device, cache_dir=folder), record)
    driven.answer((5, 6, 7))
    driven.drain()
    driven.close()
    if record.failures:
        sys.exit("\n".join(record.failures))


if __name__ == "__main__":
    main()

"""`python -m replica.timeline.make FOLDER TITLE`: makes the timeline of what an engine has written
to that folder, in a process of its own, which takes no time from anybody's event loop."""

from __future__ import annotations

import gzip
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from replica.timeline.chrome import timeline
from replica.timeline.engine_trace import PROFILE, EngineTrace
from replica.timeline.profile import read_profile

TIMELINE = "timeline.json.gz"


def make(folder: Path, title: str) -> dict[str, Any]:
    """Raises OSError, ValueError, msgspec.DecodeError."""
    trace, path = EngineTrace.read(folder), folder / PROFILE
    profile = read_profile(path, trace.device_trace) if path.exists() else None
    return timeline(trace, profile, title)


def write(made: dict[str, Any], path: Path) -> None:
    """Compressed."""
    path.write_bytes(gzip.compress(msgspec.json.encode(made), 6, mtime=0))


def main() -> None:
    folder, title = Path(sys.argv[1]), sys.argv[2]
    os.nice(10)
    with suppress(OSError):  # where memory is short, this is what may go
        Path("/proc/self/oom_score_adj").write_text("1000")
    write(make(folder, title), folder / TIMELINE)


if __name__ == "__main__":
    main()

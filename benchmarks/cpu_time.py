"""CPU time of the processes of a running server, by what they are."""

from __future__ import annotations

import os
from pathlib import Path

KINDS = {
    "ProxyActor": "proxy",
    ":Ingress": "ingress",
    ":Admission": "admission",
    ":Replica": "replica",
    "ServeController": "controller",
    "raylet": "raylet",
    "gcs_server": "gcs",
    "haproxy": "proxy",
    "replica.process": "engine",
}
"""By a part of the command line."""
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(root: int) -> dict[str, float]:
    """Of the process `root` and all below it, so far, user and system. In seconds."""
    below: dict[int, list[int]] = {}
    stats = {int(path.parent.name): _stat(path) for path in Path("/proc").glob("[0-9]*/stat")}
    for pid, (parent, _) in stats.items():
        below.setdefault(parent, []).append(pid)
    spent: dict[str, float] = {}
    left = [root]
    while left:
        pid = left.pop()
        left += below.get(pid, [])
        if pid in stats:
            kind = _kind(pid)
            spent[kind] = spent.get(kind, 0.0) + stats[pid][1] / TICKS
    return spent


def _stat(path: Path) -> tuple[int, int]:
    """Parent and ticks. Of a process that is gone, nobody's and none."""
    try:
        fields = (
            path.read_text().rpartition(")")[2].split()
        )  # before: a name that may hold anything
    except OSError:
        return 0, 0
    return int(fields[1]), int(fields[11]) + int(fields[12])


def _kind(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "other"
    return next((kind for part, kind in KINDS.items() if part in command), "other")

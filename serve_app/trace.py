"""`fairstream-trace URL`: what an engine of a running server does in its next steps, as a timeline
that https://ui.perfetto.dev opens, and as shares of time.

The key of an administrator is read from FAIRSTREAM_ADMIN_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from serve_app.telemetry.scraping import KEY, Unreadable, ask, metrics_url, plain

WRITE_S = 200.0
"""So long the server may take to answer when it has seen the steps."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="fairstream-trace", description=__doc__)
    parser.add_argument("url", metavar="URL", type=metrics_url)
    parser.add_argument("--steps", type=int, default=200, help="that are traced")
    parser.add_argument("--seconds", type=float, default=10.0, help="that are waited for them")
    parser.add_argument("--model", help="of which one replica is traced")
    parser.add_argument("--replica", help="by its name in the metrics; by default a busy one")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"))
    chosen = parser.parse_args(arguments)
    try:
        timeline = _asked(chosen)
        told = _told(timeline)
        chosen.output.write_bytes(timeline)
    except (OSError, Unreadable) as error:
        sys.exit(str(error))
    console = Console()
    head = f"{chosen.output}: {plain(told['engine'])}, {told['seconds']:.2f} s"
    console.print(head, markup=False, soft_wrap=True)
    console.print(shares(told["shares"]))
    for hazard in told["hazards"]:
        console.print(f"hazard: {plain(hazard)}", markup=False, soft_wrap=True)


def shares(told: Mapping[str, Mapping[str, float]]) -> Table:
    """By kind of step."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("steps")
    for name in ("number", "ms", "kernels run", "gaps between them", "bubble"):
        table.add_column(name, justify="right")
    for kind, one in told.items():
        cells = [f"{one[name]:.1%}" for name in ("kernels", "gaps", "bubble")]
        table.add_row(kind, f"{one['steps']:.0f}", f"{one['ms']:.2f}", *cells)
    return table


def _asked(chosen: argparse.Namespace) -> bytes:
    """Raises Unreadable."""
    names = ("steps", "seconds", "model", "replica")
    wanted = {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    url = f"{chosen.url.removesuffix('/metrics')}/admin/trace?{urlencode(wanted)}"
    request = Request(url, method="POST")
    return ask(request, os.environ.get(KEY, ""), max(chosen.seconds, 0.0) + WRITE_S)


def _told(timeline: bytes) -> Mapping[str, Any]:
    """What it says of itself. Raises Unreadable for what is none of ours."""
    try:
        told: Mapping[str, Any] = json.loads(timeline)["otherData"]
    except (ValueError, KeyError, TypeError):
        raise Unreadable("The server's answer is no timeline") from None
    return told


if __name__ == "__main__":
    main()

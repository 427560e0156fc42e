"""When a request reached Serve: what Serve does until it calls the application takes milliseconds
of a busy process.

A layer around Serve's own notes it in the scope, as `serve_app.request_ids` has it. The module
imports next to nothing: each proxy does it, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

KEY = "fairstream.arrival"


def _clock() -> str:
    """Of which clock times are: all processes of a machine have one, since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"process {os.getpid()}"


CLOCK = _clock()


class NoteArrival:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, KEY: (CLOCK, time.monotonic())}, receive, send)


def arrived_at(scope: Mapping[str, Any]) -> float | None:
    """By `time.monotonic` of this process; None if nobody has noted it, or by another clock."""
    clock, at = scope.get(KEY, ("", 0.0))
    return at if clock == CLOCK and at <= time.monotonic() else None

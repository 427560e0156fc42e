"""What `benchmarks.seeing` puts around an ingress: a clock of its own, and a switch that takes
telemetry away.

Serve asks `layers` for it, in each ingress where its HAProxy is in front. Nothing here is part of
the service.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app import request_ids
from serve_app.telemetry import records
from serve_app.telemetry.breakdown import Breakdown, Phase
from serve_app.telemetry.records import RequestRecord, SequenceRecord

FILE = "SEEING_CLOCK"
"""The variable that names the file of times."""
SWITCH = "/seeing/"
"""Behind it: "on" or "off"."""


def layers() -> list[Middleware]:
    return [*request_ids.layers(), Middleware(Clock)]


class Clock:
    """ASGI middleware: a line with the request's id and its seconds, from its head to the last
    word of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._file = Path(os.environ[FILE]).open("a", buffering=1)  # noqa: SIM115  # for good

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(SWITCH):
            switch(on=scope["path"].endswith("/on"))
            await Response()(scope, receive, send)
            return
        began = ended = time.perf_counter()

        async def timed(message: Message) -> None:
            nonlocal ended
            await send(message)
            ended = time.perf_counter()

        await self._app(scope, receive, timed)
        names = [value for name, value in scope["headers"] if name == request_ids.HEADER]
        self._file.write(f"{names[0].decode() if names else '-'} {ended - began}\n")


class Nothing(Breakdown):
    """Counts nothing."""

    def enter(self, phase: Phase) -> None:
        pass

    def during(self, phase: Phase) -> Any:
        return nullcontext()

    def count(self) -> None:
        pass


_nothing = Nothing()
_patched = (
    (records.Records, "__call__"),
    (SequenceRecord, "answer"),
    (SequenceRecord, "tell"),
)
_real = {name: getattr(owner, name) for owner, name in _patched}


async def _unrecorded(self: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """No phases, no line, no metrics, nothing kept."""
    token = records._current.set(RequestRecord(scope, breakdown=_nothing))
    try:
        await self._app(scope, receive, send)
    finally:
        records._current.reset(token)


def _untold(*_: object) -> None:
    pass


def switch(*, on: bool) -> None:
    """Whether requests that come from now on are recorded."""
    for owner, name in _patched:
        off = _unrecorded if name == "__call__" else _untold
        setattr(owner, name, _real[name] if on else off)

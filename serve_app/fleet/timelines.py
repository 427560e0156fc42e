"""Timelines of what an engine does (`replica.timeline`), from where it runs to whoever asks.

An engine writes what it did to files, and a process of its own makes the timeline of them: neither
an engine's steps nor an event loop has time for that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from replica.messages import Command, Trace, Traced, TraceOutcome
from replica.timeline.make import TIMELINE
from serve_app.fleet.step_streams import StepStreams

logger = logging.getLogger(__name__)

WRITE_S = 60.0
"""So long an engine may take to write what it has kept, and a process to make a timeline of it."""


class Timeline(NamedTuple):
    outcome: TraceOutcome | Literal["unknown"]
    """"unknown": there is no such replica."""
    compressed: bytes = b""
    """JSON by gzip, if it was written."""


Record: TypeAlias = Callable[[str, str, int, float], Awaitable[Timeline]]
"""Of a model's replica, so many steps, for so many seconds at most."""


class Timelines:
    """Of one engine. Used from one event loop."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._awaited: dict[str, asyncio.Future[TraceOutcome]] = {}
        """By folder."""

    @property
    def awaited(self) -> bool:
        """The engine owes one."""
        return bool(self._awaited)

    async def record(self, steps: int, seconds: float, title: str) -> Timeline:
        """Of the next steps, or of those that come within `seconds`."""
        with tempfile.TemporaryDirectory(
            prefix="fairstream-trace-", ignore_cleanup_errors=True
        ) as folder:
            outcome = await self._traced(Trace(folder=folder, steps=steps, seconds=seconds))
            if outcome != "written":
                return Timeline(outcome)
            return await _made(Path(folder), title)

    def take(self, traces: Iterable[Traced]) -> None:
        """What the engine has told."""
        for traced in traces:
            if (awaited := self._awaited.get(traced.folder)) is not None and not awaited.done():
                awaited.set_result(traced.outcome)

    def fail(self) -> None:
        """The engine is gone."""
        self.take(Traced(folder=folder, outcome="failed") for folder in self._awaited)

    async def _traced(self, trace: Trace) -> TraceOutcome:
        awaited = asyncio.get_running_loop().create_future()
        self._awaited[trace.folder] = awaited
        try:
            self._send(trace)
            await asyncio.wait({awaited}, timeout=trace.seconds + WRITE_S)
            return awaited.result() if awaited.done() else "failed"
        finally:
            del self._awaited[trace.folder]


async def _made(folder: Path, title: str) -> Timeline:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "replica.timeline.make", str(folder), title),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    ended = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({ended}, timeout=WRITE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await ended
    if process.returncode:
        logger.error("No timeline was made: the process ended with %d", process.returncode)
        return Timeline("failed")
    return Timeline("written", (folder / TIMELINE).read_bytes())


class FleetTimelines:
    """Of any engine that one ingress knows."""

    def __init__(self, streams: Mapping[str, StepStreams], record: Record) -> None:
        """streams: by model."""
        self._streams, self._record = streams, record

    async def record(
        self, model: str | None, replica: str | None, steps: int, seconds: float
    ) -> Timeline:
        """Of the replica that has most to do, where several may be meant."""
        known = [
            (count, name, replica_name)
            for name, streams in self._streams.items()
            for replica_name, count in streams.num_sequences.items()
            if model in (None, name) and replica in (None, replica_name)
        ]
        if not known:
            return Timeline("unknown")
        _, name, replica_name = max(known)
        return await self._record(name, replica_name, steps, seconds)

"""The parent's side of an engine process: spawn it, talk to it, outlive it.

For asyncio. It knows messages and processes, not what the engine does.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator

import msgspec
import zmq
import zmq.asyncio

from replica.config import EngineConfig
from replica.logs import LogFile
from replica.messages import Command, Event, Failed, Ready, StepReport, Stop, decode_event, encode

# The child sees the same packages as its parent, whatever made them importable there.
_BOOT = (
    "import os, sys; sys.path[:] = sys.argv.pop().split(os.pathsep); "
    "from replica.process import main; main()"
)


class EngineFailed(RuntimeError):
    """The engine process could not start, or is gone. The message says why."""


class EngineClient:
    """One engine process. Not for more than one event loop."""

    ready: Ready
    starting_s: float
    """Seconds from the start of the engine's process until it was ready."""

    def __init__(
        self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: str
    ) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder
        self._exit = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, config: EngineConfig, log: LogFile | None = None) -> EngineClient:
        """Spawn the process and wait until it is ready. Raises EngineFailed.

        log: where it writes what it has to tell; by default standard error.
        """
        spawned_ns = time.perf_counter_ns()
        folder = tempfile.mkdtemp(prefix="fairstream-")
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        address = f"ipc://{folder}/engine"
        socket.bind(address)
        settings = [msgspec.json.encode(each).decode() for each in (config, log)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _BOOT, address, *settings, os.pathsep.join(sys.path)),
            stdin=asyncio.subprocess.PIPE,
        )
        client = cls(process, socket, folder)
        try:
            event = await client._next_event()
            if not isinstance(event, Ready):
                raise EngineFailed(f"expected Ready, got {event}")
        except BaseException:
            await client.close()
            raise
        client.ready = event
        client.starting_s = (event.started_ns - spawned_ns) / 1e9
        return client

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def send(self, command: Command) -> None:
        """Never blocks. Lost if the engine is gone or not there yet: `events` raises then."""
        if self.alive:
            sent = asyncio.ensure_future(self._socket.send(encode(command), zmq.NOBLOCK))
            sent.exception()  # it is done; asyncio complains of a failure that nobody looks at

    async def events(self) -> AsyncIterator[StepReport]:
        """Reports until the engine stops. Raises EngineFailed if it was not asked to."""
        while True:
            event = await self._next_event()
            if isinstance(event, StepReport):
                yield event

    async def close(self, grace_s: float = 2.0) -> None:
        """Ask the process to stop, then kill it."""
        self.send(Stop(drain=False))
        # Not wait_for: before Python 3.12 it can swallow a cancellation.
        await asyncio.wait({self._exit}, timeout=grace_s)
        if self.alive:
            self._process.kill()
            await self._exit
        self._socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _next_event(self) -> Event:
        received = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait({received, self._exit}, return_when=asyncio.FIRST_COMPLETED)
            if not received.done():
                # Its last words may still be on their way.
                await asyncio.wait({received}, timeout=0.2)
            if not received.done():
                raise EngineFailed(f"the engine process ended with status {self._exit.result()}")
            event = decode_event(received.result())
        finally:
            received.cancel()
        if isinstance(event, Failed):
            raise EngineFailed(event.reason)
        return event

"""`ReplicaCalls` to engine hosts in this process, over a network that may fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

from ray.serve.exceptions import ReplicaUnavailableError

from replica.config import EngineConfig
from serve_app.fleet.engine_host import EngineHost
from serve_app.fleet.output_feed import Key
from tests.serve_app.scripted_engine import ScriptedEngine


class Transport:
    """With a `chance`, a call or a message is lost, late or cut off now and then."""

    def __init__(self, chance: random.Random | None = None, rate: float = 0.0) -> None:
        self.hosts: dict[str, EngineHost] = {}
        self.engines: dict[str, ScriptedEngine] = {}
        self.members: set[str] = set()
        self.streams = 0
        """Streams opened so far."""
        self.offsets: dict[Key, int] = {}
        """With which the last stream was opened."""
        self.aborts: list[Key] = []
        self.turned_away = 0
        self.rate = rate
        self._chance = chance or random.Random(0)

    async def start(self, name: str, step_s: float = 0.0) -> EngineHost:
        engine = await ScriptedEngine.start(EngineConfig(model=str(step_s)))
        self.engines[name], self.hosts[name] = engine, EngineHost(engine)
        self.members.add(name)
        return self.hosts[name]

    async def close(self) -> None:
        for host in self.hosts.values():
            await host.close()

    def remove(self, name: str) -> None:
        """The process is gone, with no last words."""
        self.members.discard(name)
        del self.hosts[name]
        self.engines.pop(name).die()

    async def submit(self, replica: str, ingress: str, submits: list[bytes]) -> None:
        if replica not in self.members:
            self.turned_away += 1
            raise ReplicaUnavailableError(replica)
        await self._maybe_fail()
        self._host(replica).submit(ingress, submits)
        await self._maybe_fail()

    async def abort(self, replica: str, ingress: str, keys: list[Key]) -> None:
        await self._maybe_fail()
        self.aborts += keys
        self._host(replica).abort(ingress, keys)
        await self._maybe_fail()

    async def steps(
        self, replica: str, ingress: str, offsets: dict[Key, int]
    ) -> AsyncGenerator[bytes, None]:
        host = self._host(replica)
        self.streams += 1
        self.offsets = offsets
        async for message in host.steps(ingress, offsets):
            await self._maybe_fail()
            if self.hosts.get(replica) is not host:
                raise ConnectionError("the process is gone")
            yield message

    def _host(self, replica: str) -> EngineHost:
        if replica not in self.hosts:
            raise ReplicaUnavailableError(replica)
        return self.hosts[replica]

    async def _maybe_fail(self) -> None:
        await asyncio.sleep(0)
        if self._chance.random() < self.rate:
            raise ConnectionError("the network ate it")

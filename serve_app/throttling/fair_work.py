"""Runs what would block the event loop in a few threads, in turns by tenant.

Tenants take turns, each with one piece at a time, so that whoever has a piece to do waits for no
more than one of each other tenant's. What each takes is charged to it. The module does not know
what is done.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from router.rate import Bucket
from serve_app.protocol.backend import Refused

T = TypeVar("T")

SECONDS_PER_MINUTE = 30
"""Thread time that one tenant gets in one process; as much can be saved up."""


class Run(Protocol):
    """Does a piece of work elsewhere, and returns what it returns or raises what it raises."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def in_thread(work: Callable[[], T], /) -> T:
    """For one who is alone."""
    return await asyncio.to_thread(work)


@dataclass(eq=False)
class _Piece(Generic[T]):
    tenant: str
    work: Callable[[], T]
    result: asyncio.Future[T]


class FairWork:
    """Used from one event loop."""

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """name: of what is done, in the plural. max_waiting: pieces of one tenant, beyond which
        `ask` refuses more. clock: in seconds."""
        self._name, self._free, self._max_waiting, self._clock = name, threads, max_waiting, clock
        self._threads = ThreadPoolExecutor(threads, name)
        self._waiting: dict[str, deque[_Piece[Any]]] = {}
        """By tenant, in the order in which these have their turns; none is empty."""
        self._running: set[str] = set()
        self._accounts: dict[str, Bucket] = {}

    def submit(self, tenant: str, work: Callable[[], T]) -> asyncio.Future[T]:
        """What `work` returns, or raises. Cancelled before its turn comes, it leaves the queue;
        once begun it goes on, and is charged, even if nobody waits for it any more."""
        piece = _Piece(tenant, work, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(piece)
        piece.result.add_done_callback(partial(self._forget, piece))
        self._start()
        return piece.result

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """`submit`, for one who waits."""
        return await self.submit(tenant, work)

    def check(self, tenant: str) -> None:
        """Raises Refused if this tenant has to come back later."""
        now = self._clock()
        account = self._accounts.get(tenant)
        if account is not None and (wait_s := account.wait_s(0.0, now)):
            reason = f"The limit for {self._name}, {SECONDS_PER_MINUTE} s a minute, is exceeded."
            raise Refused(reason, wait_s)
        if len(self._waiting.get(tenant, ())) >= self._max_waiting:
            reason = f"Too many {self._name} at once: {self._max_waiting} wait already."
            raise Refused(reason, 1.0)

    async def ask(self, tenant: str, work: Callable[[], T]) -> T:
        """`check`, then `run`: for what has cost nothing yet."""
        self.check(tenant)
        return await self.run(tenant, work)

    def _start(self) -> None:
        while self._free and (piece := self._next()) is not None:
            self._free -= 1
            self._running.add(piece.tenant)
            end = partial(self._end, piece, self._clock())
            loop = asyncio.get_running_loop()
            loop.run_in_executor(self._threads, piece.work).add_done_callback(end)

    def _next(self) -> _Piece[Any] | None:
        """The next piece of the tenant whose turn it is."""
        tenant = next((one for one in self._waiting if one not in self._running), None)
        if tenant is None:
            return None
        piece = self._waiting[tenant].popleft()
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        return piece

    def _forget(self, piece: _Piece[Any], _: object) -> None:
        """If it still waits, it has been given up."""
        pieces = self._waiting.get(piece.tenant)
        if pieces is not None and piece in pieces:
            pieces.remove(piece)
            if not pieces:
                del self._waiting[piece.tenant]

    def _end(self, piece: _Piece[T], started: float, done: asyncio.Future[T]) -> None:
        self._free += 1
        self._running.discard(piece.tenant)
        self._charge(piece.tenant, self._clock() - started)
        if (pieces := self._waiting.pop(piece.tenant, None)) is not None:
            self._waiting[piece.tenant] = pieces  # behind all others
        self._start()
        error = done.exception()
        if piece.result.done():
            return
        if error is not None:
            piece.result.set_exception(error)
        else:
            piece.result.set_result(done.result())

    def _charge(self, tenant: str, seconds: float) -> None:
        now = self._clock()
        account = self._accounts.setdefault(tenant, Bucket(SECONDS_PER_MINUTE, now))
        account.level(now)
        account.take(seconds)

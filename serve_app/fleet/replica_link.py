"""One ingress, one replica: a stream of step reports this way, batches of commands that way.

The stream is opened again when it breaks and goes on at the offsets reached; commands are
repeated until they are through. Both are safe because every message names its request,
attempt and offset. The module knows neither HTTP nor the router.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Generic, Protocol, TypeAlias, TypeVar

from ray.serve.exceptions import ReplicaUnavailableError

from replica.messages import Failed, Output, Ready, Submit, decode_event, encode
from serve_app.fleet import background
from serve_app.fleet.calls import answered
from serve_app.fleet.mailbox import Mailbox, ReplicaLost

logger = logging.getLogger(__name__)

T = TypeVar("T")
Key: TypeAlias = tuple[str, int]
"""Request id and attempt: one run of one sequence."""

STALL_S = 2.5
"""A stream carries a message at least once a second; one that does not is opened anew."""
LOST_S = 6.0
"""A replica that no stream has reached for this long is lost."""
RETRY_S = 0.05
DRAINED = "it has drained"


class ReplicaCalls(Protocol):
    """How an ingress calls a replica by name. All raise ReplicaUnavailableError."""

    async def submit(self, replica: str, ingress: str, submits: list[bytes]) -> None:
        """Start sequences; each is an encoded `Submit`."""

    async def abort(self, replica: str, ingress: str, keys: list[Key]) -> None:
        """End sequences."""

    def steps(
        self, replica: str, ingress: str, offsets: dict[Key, int]
    ) -> AsyncGenerator[bytes, None]:
        """Encoded events: `Ready`, then `StepReport`s with what lies behind the offsets.

        `Failed` is the last one of an engine that cannot go on; an end without it means that
        the replica drains and has nothing left for this ingress.
        """


class Aborts(Protocol):
    """Who hears of sequences that are aborted, by request id."""

    def stopping(self, request_id: str) -> None:
        """The sequence will be aborted."""

    def bill(self, request_id: str, gpu_s: float) -> None:
        """It has ended, and took so much of the device's time. Not told of each."""


class ReplicaLink:
    """Lives until the replica has drained or is lost, and calls `on_end` then, once.

    `on_unavailable` is called each time that the replica turns new work away.
    """

    def __init__(
        self,
        replica: str,
        ingress: str,
        calls: ReplicaCalls,
        on_end: Callable[[ReplicaLink], None],
        on_unavailable: Callable[[str], None],
        aborts: Aborts | None = None,
    ) -> None:
        self.replica = replica
        self.ready: Ready | None = None
        """What the replica said about itself, once a stream has reached it."""
        self.sequences: dict[Key, Mailbox] = {}
        self._ingress, self._calls = ingress, calls
        self._on_end, self._on_unavailable = on_end, on_unavailable
        self._on_abort = aborts
        self._heard_at = time.monotonic()
        self._submits = _Outbox(self._send_submits, self._turned_away)
        self._aborts = _Outbox(self._send_aborts, lambda keys: None)
        self._senders = [
            background.start(self._submits.send_forever(), f"submit-{replica}"),
            background.start(self._aborts.send_forever(), f"abort-{replica}"),
        ]
        self._reader = background.start(self._read_until_lost(), f"read-{replica}")

    async def close(self) -> None:
        """Stop reading and sending; the replica aborts what is left once it misses us."""
        tasks = [self._reader, *self._senders]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add(self, submit: Submit) -> Mailbox:
        """Submit a sequence; its outputs come to the mailbox that is returned."""
        mailbox = Mailbox(submit)
        self.sequences[submit.request_id, submit.attempt] = mailbox
        self._submits.put(submit)
        return mailbox

    def remove(self, key: Key) -> None:
        """Forget a sequence. One that has not finished is aborted."""
        if self.sequences.pop(key, None) is not None:
            self._aborts.put(key)
            if self._on_abort is not None:
                self._on_abort.stopping(key[0])

    async def _send_submits(self, submits: list[Submit]) -> None:
        encoded = [encode(submit) for submit in submits]
        await self._calls.submit(self.replica, self._ingress, encoded)
        for submit in submits:
            if (mailbox := self.sequences.get((submit.request_id, submit.attempt))) is not None:
                mailbox.submitted = True

    async def _send_aborts(self, keys: list[Key]) -> None:
        await self._calls.abort(self.replica, self._ingress, keys)

    def _turned_away(self, submits: list[Submit]) -> None:
        for submit in submits:
            self._lose((submit.request_id, submit.attempt), "it takes no new work", suspect=False)
        self._on_unavailable(self.replica)

    def _lose(self, key: Key, reason: str, *, suspect: bool) -> None:
        if (mailbox := self.sequences.pop(key, None)) is not None:
            text = f"replica {self.replica} is lost: {reason}"
            mailbox.fail(ReplicaLost(text, suspect=suspect and mailbox.submitted))

    async def _read_until_lost(self) -> None:
        reason = None
        while reason is None:
            reason = await self._read_stream()
        logger.info("No more from replica %s: %s", self.replica, reason)
        for key in list(self.sequences):
            self._lose(key, reason, suspect=reason != DRAINED)
        for sender in self._senders:
            sender.cancel()
        self._on_end(self)

    async def _read_stream(self) -> str | None:
        """Read one stream to its end. Returns why no other one will follow, if none will."""
        offsets = {key: mailbox.offset for key, mailbox in self.sequences.items()}
        stream = self._calls.steps(self.replica, self._ingress, offsets)
        try:
            async with aclosing(stream):
                while True:
                    event = decode_event(await answered(anext(stream), STALL_S))
                    self._heard_at = time.monotonic()
                    if isinstance(event, Failed):
                        return event.reason
                    if isinstance(event, Ready):
                        self.ready = event
                        continue
                    for output in event.outputs:
                        self._deliver(output)
        except StopAsyncIteration:
            return DRAINED
        except ReplicaUnavailableError:
            return "it is gone"
        except Exception as error:
            logger.warning("The stream from replica %s broke: %r", self.replica, error)
            await asyncio.sleep(RETRY_S)
            silence_s = time.monotonic() - self._heard_at
            return f"no word for {silence_s:.0f} s" if silence_s > LOST_S else None

    def _deliver(self, output: Output) -> None:
        key = (output.request_id, output.attempt)
        if (mailbox := self.sequences.get(key)) is None:
            if output.finish_reason is not None and self._on_abort is not None:
                self._on_abort.bill(output.request_id, output.gpu_s)
            return
        mailbox.put(output)
        if output.finish_reason is not None:
            del self.sequences[key]


class _Outbox(Generic[T]):
    """Sends what is put in: in batches, one at a time, each again until it is through."""

    def __init__(
        self,
        send: Callable[[list[T]], Awaitable[None]],
        on_unavailable: Callable[[list[T]], None],
    ) -> None:
        self._send, self._on_unavailable = send, on_unavailable
        self._items: list[T] = []
        self._filled = asyncio.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._filled.set()

    async def send_forever(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            batch, self._items = self._items, []
            try:
                await answered(self._send(batch), STALL_S)
            except ReplicaUnavailableError:
                self._on_unavailable(batch)
            except Exception as error:
                logger.warning("A replica cannot be called: %r", error)
                await asyncio.sleep(RETRY_S)
                self._items = batch + self._items
                self._filled.set()

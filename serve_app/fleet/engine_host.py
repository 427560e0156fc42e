"""One engine that serves several ingresses: commands in, a feed of outputs for each ingress.

The engine runs in its own process. This module knows which ingress a sequence belongs to; it
knows neither Ray nor the router.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

from replica.client import EngineClient
from replica.messages import (
    Abort,
    Backlog,
    Failed,
    Malformed,
    Output,
    Ready,
    Stats,
    StepReport,
    Submit,
    encode,
    read_command,
)
from serve_app.fleet import background
from serve_app.fleet.hang_detection import HangDetector, core_waits
from serve_app.fleet.output_feed import Key, OutputFeed
from serve_app.fleet.timelines import Timelines

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""An ingress hears something this often, so that it can tell a quiet replica from a lost one."""
ORPHANED_S = 10.0
"""An ingress that has not read for this long is gone; its sequences are aborted. It gives this
replica up earlier."""
ENGINE_SILENCE_S = 7.0
"""The engine reports at least once a second, but never within a step. One that is silent for
longer, though it had a core to run on, hangs, and is as good as dead."""
LOOKS = 10
"""How often its silence is looked at until it is that long."""


class EngineHost:
    """Used from one event loop."""

    def __init__(self, engine: EngineClient) -> None:
        """Takes over an engine that is ready."""
        self.drains = False
        """No new work is to come: a stream ends when it has delivered everything."""
        self.failure = ""
        """Why the engine is gone, if it is."""
        self.stats = Stats()
        """What the engine reported last."""
        self.timelines = Timelines(engine.send)
        self._engine = engine
        self._feeds: dict[str, OutputFeed] = {}
        self._owners: dict[Key, OutputFeed] = {}
        self._backlog = False
        look_s = ENGINE_SILENCE_S / LOOKS
        self._hang = HangDetector(look_s, core_waits(engine.pid))
        self._watch = background.start(self._watch_engine(look_s), "engine-watch")
        self._events = background.start(self._read_engine(), "engine-events")

    @property
    def ready(self) -> Ready:
        """What the engine said about itself."""
        return self._engine.ready

    @property
    def starting_s(self) -> float:
        """How long the engine took until it was ready."""
        return self._engine.starting_s

    async def close(self) -> None:
        """Stop the engine."""
        self._events.cancel()
        self._watch.cancel()
        await self._engine.close()

    def raise_if_dead(self) -> None:
        """Raises RuntimeError when the engine is gone or hangs."""
        if self.failure:
            raise RuntimeError(self.failure)

    def submit(self, ingress: str, submits: list[bytes]) -> None:
        """Start sequences, each an encoded `Submit`. One that is known already is ignored, and
        one that cannot be read is refused alone."""
        feed = self._feed(ingress)
        for data in submits:
            submit = read_command(data)
            if isinstance(submit, Malformed):
                feed.refuse((submit.request_id, submit.attempt), "error", submit.reason)
            elif not isinstance(submit, Submit):
                logger.error("Ingress %s sent %d bytes that are no request", ingress, len(data))
            elif feed.open(submit):
                self._owners[submit.request_id, submit.attempt] = feed
                self._engine.send(submit)

    def abort(self, ingress: str, keys: list[Key]) -> None:
        """End sequences. One that has ended is left alone."""
        feed = self._feed(ingress)
        for key in keys:
            if not feed.refuse(key):
                self._abort(key)

    async def steps(self, ingress: str, offsets: dict[Key, int]) -> AsyncGenerator[bytes, None]:
        """The one stream of an ingress, as `ReplicaCalls.steps` describes it."""
        feed = self._feed(ingress)
        reader = feed.attach(offsets)
        try:
            yield encode(self._engine.ready)
            while feed.is_attached(reader):
                outputs = await feed.take(reader, HEARTBEAT_S)
                yield encode(StepReport(outputs=outputs, stats=Stats()))
                if self.failure:
                    yield encode(Failed(reason=self.failure))
                if self.failure or (self.drains and not outputs and not feed.unfinished):
                    return
        finally:
            feed.detach(reader)

    def hand_back(self, *, begun: bool) -> None:
        """Let others have what has no output yet, and with `begun` what has some, too."""
        for feed in self._feeds.values():
            for key in feed.hand_back(begun=begun):
                self._abort(key)
                self._owners.pop(key, None)

    def tell_backlog(self, waiting: bool) -> None:
        """Whether the router holds work that this engine has no credit for."""
        if waiting != self._backlog:
            self._backlog = waiting
            self._engine.send(Backlog(waiting=waiting))

    def drop_orphans(self) -> None:
        """Abort what belongs to ingresses that are gone. To be called now and then."""
        for ingress, feed in list(self._feeds.items()):
            if feed.unread_s > ORPHANED_S:
                for key in feed.unfinished:
                    self._abort(key)
                del self._feeds[ingress]

    def _feed(self, ingress: str) -> OutputFeed:
        return self._feeds.setdefault(ingress, OutputFeed())

    def _abort(self, key: Key) -> None:
        if key in self._owners:
            self._engine.send(Abort(request_id=key[0], attempt=key[1]))

    async def _read_engine(self) -> None:
        try:
            async for report in self._engine.events():
                self._hang.heard()
                self.stats = report.stats
                self.timelines.take(report.traced)
                for output in report.outputs:
                    self._record(output)
            self._fail("the engine process ended")
        except Exception as error:  # EngineFailed; an error of ours would be as fatal
            self._fail(str(error) or repr(error))
        self._watch.cancel()

    async def _watch_engine(self, look_s: float) -> None:
        looked_at = time.monotonic()
        while self._hang.counted_s < ENGINE_SILENCE_S:
            await asyncio.sleep(look_s)
            if self.timelines.awaited:
                self._hang.heard()  # it may well be writing one
            now = time.monotonic()
            self._hang.look(now - looked_at, core_waits(self._engine.pid))
            looked_at = now
        self._events.cancel()
        self._fail(f"the engine was silent for {ENGINE_SILENCE_S:.0f} s")

    def _fail(self, reason: str) -> None:
        self.failure = reason
        logger.error("The engine is gone: %s", reason)
        self.timelines.fail()
        for feed in self._feeds.values():
            feed.wake()

    def _record(self, output: Output) -> None:
        key = (output.request_id, output.attempt)
        if (feed := self._owners.get(key)) is not None:
            feed.record(output)
            if output.finish_reason is not None:
                del self._owners[key]

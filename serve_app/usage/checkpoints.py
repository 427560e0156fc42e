"""Saves the usage of running requests, since all processes that know it may die at once.

Only an ingress and Admission know what a request has used. If one of them ends, the other one tells
the rest; if both do, with their node say, what was written last is booked. Knows neither Ray nor
where it is written.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from router.ledger import Running
from router.messages import Ending, Outcome, RequestInfo, Sync
from router.router import Router
from router.store import Store

logger = logging.getLogger(__name__)

LOST_S = 30.0
"""An ingress tells several times a second, and ends itself when it is stuck for so long."""
OTHERS_S = 300.0
"""The same of a store that others share: theirs may only be without an Admission for a while."""
LOOK_S = 5.0
EARLIER = -1
"""Epoch of whoever wrote it: it is not the present one."""


class Checkpoints:
    """Used from one event loop, by who writes the journal."""

    def __init__(self, store: Store, router: Router) -> None:
        self._store, self._router = store, router
        self._written: set[str] = set()
        """Ingresses of which something is in the store."""
        self._look_at = time.monotonic() + LOST_S
        """By then every living ingress has been heard."""

    async def take(self) -> dict[str, str]:
        """By ingress, what runs, to be written down with the journal that is taken afterwards;
        empty where nothing does any more.

        Others may go on between two ingresses. What ends meanwhile is in both, and known by its id.
        """
        running = {}
        for name in self._router.snapshot(()).ingresses:
            if requests := self._router.running(name):
                running[name] = msgspec.json.encode(requests).decode()
            await asyncio.sleep(0)
        ended = dict.fromkeys(self._written - running.keys(), "")
        self._written = set(running)
        return ended | running

    async def settle_lost(self) -> None:
        """Book as failed what ran at ingresses that nobody has heard of since; it is written with
        the next journal."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_S
        silence_s = OTHERS_S if self._store.shared else LOST_S
        lost = await asyncio.to_thread(self._store.lost, time.time() - silence_s)
        for name in lost.keys() - self._router.snapshot(()).ingresses.keys():
            self._settle(name, lost[name])
        self._written |= lost.keys()  # so that it is deleted, where nothing runs

    def _settle(self, ingress: str, written: str) -> None:
        try:
            requests = msgspec.json.decode(written, type=list[Running])
        except msgspec.DecodeError as error:
            logger.error("what %s ran cannot be read, and is not booked: %s", ingress, error)
            return
        logger.warning("%s is lost: %d requests are booked as failed", ingress, len(requests))
        endings = tuple(_ending(request) for request in requests)
        self._router.sync(Sync(ingress, sequence=0, epoch=EARLIER, endings=endings))


def _ending(request: Running) -> Ending:
    prompt, cached, output = request.used
    info = RequestInfo(request.request_id, request.tenant, prompt, output, model=request.model)
    return Ending(info, Outcome.FAILED, output, cached, gpu_s=request.gpu_s)

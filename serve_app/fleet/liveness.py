"""Ends this process when it can do its work no longer, so that Serve replaces it.

Serve runs a deployment's own health check on the event loop that serves requests, so a spike of
them delays the answer. Without one it answers at once, from a loop of its own, as long as the
process lives: this module makes that the truth. It does not know what the work is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
TIMEOUT_S = 10.0
FAILURES = 3
"""In a row: an engine that only got no CPU for a while is heard of again."""


class LivenessCheck(threading.Thread):
    """A thread, since a loop that hangs cannot notice that."""

    def __init__(
        self,
        check: Callable[[], None],
        period_s: float = PERIOD_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`check` raises where the work cannot go on. It is called on the present event loop,
        which has `timeout_s` to get to it."""
        super().__init__(name="self-check", daemon=True)
        self._check, self._period_s, self._timeout_s = check, period_s, timeout_s
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """From here on the work may end."""
        self._stopped.set()

    def run(self) -> None:
        failures = 0
        while failures < FAILURES:
            if self._stopped.wait(self._period_s):
                return
            failures = 0 if self._passes() else failures + 1
        logger.critical("This process ends, to be replaced")
        logging.shutdown()
        os._exit(1)  # An orderly end might wait for what hangs.

    def _passes(self) -> bool:
        try:
            asyncio.run_coroutine_threadsafe(self._call(), self._loop).result(self._timeout_s)
        except TimeoutError:
            logger.error("The event loop has been busy for %.0f s", self._timeout_s)
        except Exception as error:
            logger.error("The work cannot go on: %s", error)
        else:
            return True
        return False

    async def _call(self) -> None:
        self._check()

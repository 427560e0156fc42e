"""Tasks that outlive the request in which they were started.

Serve cancels what a request started as soon as its client disconnects; it finds the
request in the context variables of the task. A task with an empty context belongs to no
request.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


def start(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run `coroutine` outside any request. The caller keeps the task; an error is logged."""
    task = contextvars.Context().run(asyncio.create_task, coroutine, name=name)
    task.add_done_callback(_log_error)
    return task


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("Task %s ended with an error", task.get_name(), exc_info=error)

"""Calls to other processes, which must never cancel their caller.

Serve ends a call of which it has lost sight with a CancelledError of its own, as when a timeout
cancels a call. Whoever awaits that is ended by it, though nobody has cancelled them. Here each
call is a task of its own, so that it cannot be mistaken. The module knows no particular call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

CANCEL_S = 1.0
"""How long a call may take to end once it is given up."""


async def answered(call: Awaitable[T], timeout_s: float) -> T:
    """What the call returns. Raises TimeoutError, ConnectionError if somebody else has ended it, or
    what it raises."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait((task,), timeout=timeout_s)
        if not task.done():
            raise TimeoutError
    finally:
        await _give_up(task)
    if task.cancelled():
        raise ConnectionError("the call was ended by somebody else")
    return task.result()


async def _give_up(task: asyncio.Future[T]) -> None:
    """Nothing, if it is done. What it ends with counts as seen."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=CANCEL_S)
    if task.done() and not task.cancelled():
        task.exception()

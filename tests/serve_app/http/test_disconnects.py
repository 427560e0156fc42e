"""Work ends with the client that wants it, and with its caller."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from serve_app.http.streaming import unless_disconnected


async def hang() -> dict[str, str]:
    return await asyncio.Future()


async def test_work_that_ends_gives_its_result() -> None:
    async def work() -> int:
        return 3

    assert await unless_disconnected(hang, work()) == 3


async def test_work_that_fails_raises() -> None:
    async def work() -> int:
        raise KeyError

    with pytest.raises(KeyError):
        await unless_disconnected(hang, work())


async def test_work_has_ended_when_a_disconnect_is_told() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await unless_disconnected(receive, work())
    assert ended == [True]


async def test_work_is_cancelled_with_its_caller() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(True)

    task = asyncio.create_task(unless_disconnected(hang, work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]

"""What becomes of whoever calls, however the call ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.fleet.admission_client import AdmissionClient
from serve_app.fleet.calls import answered
from tests.serve_app.fleet_world import until


async def test_an_answer_is_passed_on() -> None:
    assert await answered(asyncio.sleep(0, "yes"), 1.0) == "yes"


async def test_an_error_is_passed_on() -> None:
    async def fail() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        await answered(fail(), 1.0)


async def test_a_call_that_ends_as_if_cancelled_cancels_nobody() -> None:
    async def lost() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ConnectionError):
        await answered(lost(), 1.0)


@pytest.mark.parametrize("error", [asyncio.CancelledError, LookupError])
async def test_nor_does_one_that_took_too_long_whatever_it_ends_with(
    error: type[BaseException],
) -> None:
    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise error from None

    with pytest.raises(TimeoutError):
        await answered(slow(), 0.01)


async def test_whoever_is_cancelled_gives_the_call_up() -> None:
    ended = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    calling = asyncio.create_task(answered(slow(), 60.0))
    await asyncio.sleep(0.01)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert ended.is_set()


async def test_calls_that_serve_gives_up_by_itself_end_no_conversation() -> None:
    """They end as if their caller had been cancelled."""
    count = 0

    async def lost(*_: object) -> Any:
        nonlocal count
        count += 1
        raise asyncio.CancelledError

    client = AdmissionClient("ingress", lost, lost)
    client.start()
    await until(lambda: count > 4, 5)
    client.raise_if_dead()
    await client.close()

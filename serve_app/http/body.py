"""Reads the JSON body of a request, and no more of it than is allowed.

Nothing is built of a body that holds too much, and a large one is read in a thread: one of each
tenant at a time, so that nobody waits behind all those of another.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from fastapi import Request
from pydantic import BaseModel, ValidationError

from serve_app.protocol.errors import ApiError, from_validation, invalid
from serve_app.protocol.json_parts import MAX_PARTS, MAX_VALUES, Allowance
from serve_app.telemetry import records
from serve_app.telemetry.breakdown import Phase

M = TypeVar("M", bound=BaseModel)

LARGE_BYTES = 64 * 1024
"""What is smaller is read at once: whatever it holds, within milliseconds."""


class Bodies:
    """Reads the bodies of all requests. Used from one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, "bodies")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, request: Request, kind: type[M]) -> M:
        """The body as a checked `kind`.

        Raises ApiError: 415 if it does not call itself JSON or is compressed, 413 if it is too
        large, 400 if it holds too much, is not JSON or not valid. ClientDisconnect if the client
        hangs up meanwhile.
        """
        _require_plain_json(request)
        body = await self._receive(request)
        records.current().breakdown.enter(Phase.PREPARE)
        if len(body) <= LARGE_BYTES:
            return parse(kind, body)
        turn = self._turns.setdefault(request.state.tenant.id, asyncio.Lock())
        async with turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, parse, kind, body)

    async def _receive(self, request: Request) -> bytes:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_large()
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._max_bytes:
                raise self._too_large()
            chunks.append(chunk)
        return b"".join(chunks)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_bytes} bytes.")


def parse(kind: type[M], body: bytes) -> M:
    """Raises ApiError. Strings that are JSON again, such as arguments of calls, have an allowance
    of their own, all together."""
    if not Allowance().covers(body):
        message = (
            f"The body holds more than {MAX_PARTS} strings, objects and lists, or more than "
            f"{MAX_VALUES} values."
        )
        raise invalid(message)
    try:
        return kind.model_validate_json(body, context=Allowance())
    except ValidationError as error:
        raise from_validation(error) from None


def _require_plain_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise ApiError(415, "The Content-Type must be application/json.")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "The body must not be compressed: send it without Content-Encoding.")

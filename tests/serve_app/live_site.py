"""The live page and `/metrics` of made-up processes, over real HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from serve_app.fleet import background
from serve_app.http.live_page import LivePage
from serve_app.http.metrics_page import MetricsPage
from serve_app.telemetry.exposition import Source, exposition
from serve_app.telemetry.live import LiveFigures
from tests.serve_app.metered_site import until

KEY = "fs-admin"
Read = Callable[[], Awaitable[list[Source]]]


@asynccontextmanager
async def live_site(read: Read, port: int = 0) -> AsyncIterator[str]:
    """Its address. It ends with streams open, as a process that is killed."""
    app = FastAPI()

    async def text() -> bytes:
        return exposition(await read())

    figures = LiveFigures(read, background.start)
    app.add_middleware(MetricsPage, is_admin=KEY.__eq__, allowed=(), text=text)
    app.add_middleware(LivePage, is_admin=KEY.__eq__, figures=figures)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        config = uvicorn.Config(app, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            for connection in [*server.server_state.connections]:
                connection.transport.abort()
            await serving

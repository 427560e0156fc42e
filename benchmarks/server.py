"""A server under test: a configuration that runs as a user starts it, and is stopped again."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import yaml

SERVE_RUN = ("ray.serve.scripts", "run")
OUR_RUN = ("serve_app.run",)
READY_TIMEOUT_S = 180
LOG_TAIL = 4000


@dataclass(frozen=True, slots=True)
class Server:
    base_url: str
    model: str
    ready_s: float
    """From its start to /ready answering 200."""
    process: subprocess.Popen[bytes]


@contextmanager
def serving(config: Path, *, module: Sequence[str] = SERVE_RUN, **engine: Any) -> Iterator[Server]:
    """engine: overrides settings of the engine. The rest is as with `running`."""
    settings = yaml.safe_load(config.read_text())
    settings["applications"][0]["args"]["engine"] |= engine
    with running(settings, module=module) as server:
        yield server


def behind_haproxy(settings: dict[str, Any]) -> None:
    """Change a configuration, so that Serve's HAProxy is in front, as the manifests in k8s/ do."""
    names = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
    variables = {"env_vars": dict.fromkeys(names, "1")}
    settings["controller_options"] = {"runtime_env": variables}
    settings["applications"][0]["runtime_env"] = variables


@contextmanager
def running(settings: dict[str, Any], *, module: Sequence[str] = SERVE_RUN) -> Iterator[Server]:
    """settings: what stands in a configuration file. module: what runs it, with arguments.

    To be used from the main thread. Raises TimeoutError if it does not come up.
    """
    [application] = settings["applications"]
    with (
        tempfile.NamedTemporaryFile("w", suffix=".yaml") as file,
        tempfile.TemporaryFile("w+", errors="replace") as log,
        _sigterm_as_interrupt(),
    ):
        yaml.safe_dump(settings, file)
        file.flush()
        started = time.perf_counter()
        command = [sys.executable, "-m", *module, file.name]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            host = settings.get("http_options", {})
            url = f"http://{host.get('host', '127.0.0.1')}:{host.get('port', 8000)}"
            _wait_ready(url, process, log)
            ready_s = time.perf_counter() - started
            yield Server(f"{url}/v1", application["args"]["model_name"], ready_s, process)
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Or this process would end at once, and leave the server behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: IO[str]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    log.seek(0)
    raise TimeoutError(
        f"no server at {url} (its status: {process.poll()})\n{log.read()[-LOG_TAIL:]}"
    )

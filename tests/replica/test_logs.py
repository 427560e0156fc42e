from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from replica import logs
from replica.logs import LogFile, log_to, mask
from router.tenant import digest
from serve_app.keys import new_key

logger = logging.getLogger("replica.of_a_test")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in logs.LOGGERS]
    kept = [(each, each.handlers, each.propagate, each.level) for each in loggers]
    yield
    for each, handlers, propagate, level in kept:
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """What was logged until now."""
    path = tmp_path / "logs" / "a.log"
    request = {"request_id": "r-1", "tenant": "acme"}
    log_to(LogFile(str(path), {"replica": "abc"}), lambda: request, ["the server's secret"])
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_there_at_once_with_time_level_process_and_request(
    read: Callable[[], list[dict[str, Any]]],
) -> None:
    logger.info("%s tokens", 5, extra={"fields": {"outcome": "succeeded"}})
    [line] = read()
    moment = datetime.fromisoformat(line.pop("time").replace("Z", "+00:00"))
    assert abs(datetime.now(timezone.utc) - moment) < timedelta(minutes=1)
    assert line == {
        "level": "INFO",
        "replica": "abc",
        "request_id": "r-1",
        "tenant": "acme",
        "logger": "replica.of_a_test",
        "message": "5 tokens",
        "outcome": "succeeded",
    }


def test_a_traceback_is_one_line(read: Callable[[], list[dict[str, Any]]]) -> None:
    try:
        raise ValueError("no\nnumber")
    except ValueError:
        logger.exception("it failed")
    [line] = read()
    assert line["level"] == "ERROR"
    assert line["traceback"].endswith("ValueError: no\nnumber")


def test_nobody_writes_a_line_of_his_own(read: Callable[[], list[dict[str, Any]]]) -> None:
    text = '\n{"level": "INFO"}\r\u2028\x00\ud800'
    logger.warning("of a client: %s", text)
    [line] = read()
    assert line["message"] == f"of a client: {text}"


def test_a_line_is_bounded(read: Callable[[], list[dict[str, Any]]]) -> None:
    logger.warning("a%sz", "b" * 10**6)
    [line] = read()
    assert len(line["message"]) < 20_000
    assert line["message"][0] + line["message"][-1] == "az"


@pytest.mark.parametrize(
    "secret",
    [
        "redis://:pass@w0rd/1@host:6379/1",
        "rediss://user:p%40ss@host/0",
        "postgresql://user:password@host",
        "https://ghp_0123456789@host/path",
        new_key(),
        digest("key"),
        digest("key", b"secret"),
        "Authorization: Bearer anything-at_all.1",
        "hf_abcdefghijklmnopqrst",
        "{'password': 'hunter2-hunter2'}",
        '{"api_key": "hunter2-hunter2"}',
        "FAIRSTREAM_KEY_SECRET=0123456789abcdef",
        "the server's secret",
    ],
)
def test_secrets_are_masked_wherever_they_are(
    secret: str, read: Callable[[], list[dict[str, Any]]]
) -> None:
    error = ConnectionError(f"cannot connect to {secret} now")
    logger.error("it was %s", secret, exc_info=error, extra={"fields": {"url": secret}})
    [line] = read()
    for text in (line["message"], line["traceback"], line["url"]):
        assert secret not in text
        assert "***" in text
    for part in ("pass@", "w0rd", "p%40ss", "hunter2", "anything", "0123456789", "ghij"):
        assert part not in (line["url"] if part in secret else "")
    assert line["traceback"].endswith(" now")


@pytest.mark.parametrize(
    "text",
    [
        "at most 5 tokens: 12 were asked for",
        "http://127.0.0.1:8000/v1 answers",
        "the key of tenant acme is unknown",
        "1.5 s, 99 %, a@b.example",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert mask(text) == text


def test_files_are_rotated_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 1000)
    log_to(LogFile(str(tmp_path / "a.log")))
    for number in range(100):
        logger.info("line %d", number)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) == 1 + logs.BACKUPS
    assert max(sizes) <= 1000
    assert '"line 99"' in (tmp_path / "a.log").read_text()


def test_what_was_logged_outlives_the_process(tmp_path: Path) -> None:
    """However it ends."""
    path = tmp_path / "a.log"
    script = (
        "import logging, os, signal\n"
        "from replica.logs import LogFile, log_to\n"
        f"log_to(LogFile({str(path)!r}))\n"
        "logging.getLogger('serve_app.x').info('the last words')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    assert json.loads(path.read_text())["message"] == "the last words"

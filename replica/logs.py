"""Log lines for machines: JSON objects, one a line, with time and level, and without secrets.

A process calls `log_to` once; then whatever our loggers are told from `INFO` on is in its file
before the call returns, whoever else handles logs in the process. The module knows neither what
is logged nor where files lie.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec

LOGGERS = ("replica", "router", "serve_app", "asyncio")
"""Our packages, and asyncio, which reports errors of tasks that nobody awaited."""
MAX_BYTES = 64 * 2**20
BACKUPS = 3
"""How many full log files are kept beside the current one."""
MAX_TEXT = 16_384
"""Longest message or traceback, in characters: of a longer one the beginning and the end are
kept."""

_SECRETS = [
    # What stands before the host of a URL, whatever characters a password has.
    (re.compile(r'://[^\s"\\]*@'), "://***@"),
    # Digests of API keys, and keys: ours, and those of the hub.
    (re.compile(r"(sha256:)[0-9a-f]{8,}"), r"\1***"),
    (re.compile(r"\b(fs-|hf_|sk-)[A-Za-z0-9_-]{16,}"), r"\1***"),
    (re.compile(r"(?i)\b(bearer|basic) +[^\s\"\\]+"), r"\1 ***"),
    (
        re.compile(
            r"(?i)((?:password|passwd|secret|api[_-]?key)\w*(?:\\?[\"'])?\s*[=:]\s*(?:\\?[\"'])?)"
            r"[^\s\"'\\,;}]+"
        ),
        r"\1***",
    ),
]

Fields = Mapping[str, object]


def no_fields() -> Fields:
    return {}


def mask(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without passwords, keys and digests, and without any of `secrets`."""
    for secret in secrets:
        text = text.replace(secret, "***")
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


class JsonLines(logging.Formatter):
    """Fields of a line: time (UTC), level, those of the process, those of the request that is
    served, logger, message, those of the call (`extra={"fields": {...}}`), traceback."""

    def __init__(
        self,
        process: Fields,
        request: Callable[[], Fields] = no_fields,
        secrets: Iterable[str] = (),
    ) -> None:
        """request: called for each line, in the context of who logs. secrets: never shown."""
        super().__init__()
        self._process, self._request = dict(process), request
        # As they look within JSON. A short one would be found in every word.
        self._secrets = [_quoted(secret) for secret in secrets if len(secret) >= 8]

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            **self._process,
            **self._request(),
            "logger": record.name,
            "message": _shortened(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = _shortened(self.formatException(record.exc_info))
        return mask(_encode(line), self._secrets)


class LogFile(msgspec.Struct, frozen=True):
    """Where a process writes, and what each of its lines says of it."""

    path: str
    process: dict[str, str] = {}  # msgspec copies it


def log_to(
    file: LogFile, request: Callable[[], Fields] = no_fields, secrets: Iterable[str] = ()
) -> None:
    """Let our loggers write there, and nowhere else. Raises OSError if that is impossible."""
    Path(file.path).parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(
        file.path, maxBytes=MAX_BYTES, backupCount=BACKUPS, encoding="utf-8"
    )
    handler.setFormatter(JsonLines(file.process, request, secrets))
    _handle(handler)


def log_to_terminal() -> None:
    """Let our loggers write to standard error, for people."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _handle(handler)


def _handle(handler: logging.Handler) -> None:
    """All that ours say, alone."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} ... {text[-half:]}"


def _encode(value: object) -> str:
    """ASCII: a lone surrogate of a client's would be no UTF-8."""
    return json.dumps(value, default=repr)


def _quoted(secret: str) -> str:
    return _encode(secret)[1:-1]

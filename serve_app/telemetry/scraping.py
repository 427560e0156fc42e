"""Asks a running server for its metrics and more, for commands that tell what it does."""

from __future__ import annotations

import argparse
import gzip
import json
import time
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from serve_app.telemetry.readings import Scrape, scrape

KEY = "FAIRSTREAM_ADMIN_KEY"
"""Where such a command finds the key of an administrator."""
TIMEOUT_S = 10.0
MAX_BYTES = 64 * 2**20
"""Most that is read of an answer."""


class Unreadable(Exception):
    """There is no answer, or it is no metrics; the message says why."""


class _NoRedirects(HTTPRedirectHandler):
    """The key goes to nobody but the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = build_opener(_NoRedirects)


def fetch(url: str, key: str) -> Scrape:
    """The metrics. Raises Unreadable."""
    try:
        return scrape(ask(Request(url), key).decode(), time.monotonic())
    except ValueError as error:
        raise Unreadable(f"{url} cannot be read: {plain(str(error))}") from None


def ask(request: Request, key: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """The body of the answer, at most MAX_BYTES as it comes. Raises Unreadable."""
    url = request.full_url
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        with _opener.open(request, timeout=timeout_s) as answer:
            body: bytes = answer.read(MAX_BYTES)
            packed = answer.headers.get("Content-Encoding") == "gzip"
            return gzip.decompress(body) if packed else body
    except HTTPError as error:
        hint = f"{KEY} is to hold a key of an administrator" if error.code == 401 else _why(error)
        raise Unreadable(f"{url} answers {error.code}{hint and ': '}{hint}") from None
    except (OSError, EOFError, HTTPException, ValueError) as error:
        raise Unreadable(f"{url} cannot be read: {plain(str(error))}") from None


def _why(error: HTTPError) -> str:
    """What the server says, if it is one of ours."""
    try:
        return plain(str(json.loads(error.read(MAX_BYTES))["error"]["message"]))
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return ""


def metrics_url(text: str) -> str:
    """Raises argparse.ArgumentTypeError for what is no address of a server."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError("an address like http://127.0.0.1:8000 is needed")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    return parts._replace(path=f"{path}/metrics", query="", fragment="").geturl()


def plain(text: str) -> str:
    """What changes neither colours nor the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)

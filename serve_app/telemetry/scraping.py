"""Reads `GET /metrics` of a running server, for commands that tell what it does."""

from __future__ import annotations

import argparse
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
    """Raises Unreadable."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with _opener.open(Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
            text = answer.read(MAX_BYTES).decode()
        return scrape(text, time.monotonic())
    except HTTPError as error:
        hint = f": {KEY} is to hold a key of an administrator" if error.code == 401 else ""
        raise Unreadable(f"{url} answers {error.code}{hint}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise Unreadable(f"{url} cannot be read: {plain(str(error))}") from None


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

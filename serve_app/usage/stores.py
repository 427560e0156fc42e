"""Where usage is kept: the `Store` that the settings name."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from router.store import SqliteStore, Store
from serve_app.settings import redis_password


def open_store(usage: Path | str | None) -> Store:
    """A path is a file of SQLite's, a string the URL of a Redis, None memory alone. Raises OSError
    or ValueError for a file that cannot be opened, ValueError for what is no such URL, and
    ImportError where the client of Redis is not installed. A Redis need not be up yet.
    """
    if isinstance(usage, str):
        from serve_app.usage.redis_store import RedisStore  # an optional dependency

        return RedisStore(usage, redis_password())
    try:
        return SqliteStore(usage or ":memory:")
    except sqlite3.Error as error:
        raise ValueError(f"usage: {usage} cannot be used: {error}") from error

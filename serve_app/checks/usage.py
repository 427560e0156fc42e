"""Whether usage can be kept where a configuration says, and by one Admission alone.

Looks at files, and makes none; starts nothing.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from ray.serve.schema import DeploymentSchema

from serve_app.fleet.membership import ALONE
from serve_app.settings import AppConfig
from serve_app.usage.stores import open_store


def check_usage(usage: Path | str | None) -> None:
    """Raises ValueError with a sentence."""
    if isinstance(usage, str):
        try:
            open_store(usage).close()  # connects when first needed
        except ValueError as error:
            raise ValueError(f"usage: this is no URL of a Redis: {error}") from None
    elif usage is not None and usage.exists():
        _check_file(usage)
    elif usage is not None and usage.parent.exists():
        _check_folder(usage.parent, usage)


def about_usage(usage: Path | str | None) -> Iterator[str]:
    """A file in a folder that is not here may be meant for another machine."""
    if isinstance(usage, Path) and not usage.parent.exists():
        folder = next(parent for parent in usage.absolute().parents if parent.exists())
        try:
            _check_folder(folder, usage)
        except ValueError as error:
            yield str(error)


def check_shared(configs: Iterable[AppConfig]) -> None:
    """Each application has an Admission, and a file has one that writes it. Raises ValueError."""
    files = [config.usage.resolve() for config in configs if isinstance(config.usage, Path)]
    for file in files:
        if files.count(file) > 1:
            raise ValueError(
                f"usage: two applications would write {file}: give each its own, or all one Redis"
            )


def check_admission(deployment: DeploymentSchema) -> None:
    """Raises ValueError where there would be several: each would grant all that a tenant may."""
    numbers = [deployment.num_replicas, *_bounds(deployment.autoscaling_config)]
    # Serve's schema has a mark of its own for what is not written.
    if any(number == "auto" or (isinstance(number, int) and number != 1) for number in numbers):
        raise ValueError(ALONE)


def _bounds(scaling: object) -> list[object]:
    options = scaling if isinstance(scaling, dict) else {}
    return [options.get(name, 1) for name in ("min_replicas", "max_replicas")]


def _check_folder(folder: Path, file: Path) -> None:
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ValueError(f"usage: {file} cannot be made: {folder} cannot be written to")


def _check_file(file: Path) -> None:
    """Beside the file SQLite makes others."""
    if not file.is_file():
        raise ValueError(f"usage: {file} is no file")
    if not os.access(file, os.W_OK):
        raise ValueError(f"usage: {file} cannot be written to")
    _check_folder(file.parent, file)
    try:
        with closing(sqlite3.connect(file.absolute().as_uri() + "?mode=ro", uri=True)) as db:
            [found] = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):  # A server is at work with it.
            return
        found = str(error)
    if found != "ok":
        raise ValueError(f"usage: {file} is no intact file of SQLite's: {found}")

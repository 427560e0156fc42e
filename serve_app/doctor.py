"""`fairstream-doctor URL`: watches a running server for a while and says what limits it.

The key of an administrator is read from FAIRSTREAM_ADMIN_KEY; addresses in `metrics_from` need
none.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from serve_app.telemetry.diagnosis import Facts, diagnose, lines
from serve_app.telemetry.readings import Readings
from serve_app.telemetry.scraping import KEY, Unreadable, fetch, metrics_url, plain

EVERY_S = 2.0
"""As often as processes tell."""


def watch(url: str, key: str, seconds: float) -> Facts:
    """Raises Unreadable."""
    scrapes = [fetch(url, key)]
    while scrapes[-1].at < scrapes[0].at + seconds:
        time.sleep(EVERY_S)
        scrapes.append(fetch(url, key))
    return Facts.of(Readings(scrapes))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="fairstream-doctor", description=__doc__)
    parser.add_argument("url", metavar="URL", type=metrics_url)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long it watches")
    chosen = parser.parse_args(arguments)
    try:
        facts = watch(chosen.url, os.environ.get(KEY, ""), chosen.seconds)
    except Unreadable as error:
        sys.exit(str(error))
    print(*map(plain, lines(diagnose(facts), facts)), sep="\n")


if __name__ == "__main__":
    main()

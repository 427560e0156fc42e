"""`fairstream-top URL`: what a running server does, read from its `/metrics` every two seconds.

The key of an administrator is read from FAIRSTREAM_ADMIN_KEY; addresses in `metrics_from` need
none.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app.telemetry import figures
from serve_app.telemetry.readings import Readings
from serve_app.telemetry.scraping import KEY, Unreadable, fetch, metrics_url, plain

WINDOW = 6
"""Scrapes, over which rates are taken: processes tell every two seconds, not in step with us."""
WORDS = ("held back by", "left this minute", "budget left")
"""Columns of several words."""
NOTHING = "-"


def page(readings: Readings, tenants: int) -> Group:
    """The tables. tenants: most rows of the last one."""
    return Group(_models(readings), _engines(readings), _tenants(readings, tenants))


def _models(readings: Readings) -> Table:
    rows = [
        (
            *(each.model, f"{each.replicas:.0f}", f"{each.slots:.0f}", f"{each.free:.0f}"),
            f"{each.requests_per_s:.1f}",
            *map(_seconds, each.first_token_s[:2]),
            *map(_seconds, each.gap_s[:2]),
        )
        for each in figures.models(readings)
    ]
    tails = ("TTFT p50", "TTFT p95", "gap p50", "gap p95")
    return _table(("model",), ("replicas", "places", "free", "requests/s", *tails), rows)


def _engines(readings: Readings) -> Table:
    states = figures.STATES[:-1]  # the last is over when there is something to see
    rows = [
        (
            *(each.model, each.replica),
            *(f"{each.device[state]:.1%}" if each.device else NOTHING for state in states),
            *(f"{each.running:.0f}", f"{each.waiting:.0f}", f"{each.kv_used:.0%}"),
            f"{each.output_per_s:.0f}",
        )
        for each in figures.engines(readings)
    ]
    return _table(("model", "replica"), (*states, "run", "wait", "KV", "tokens/s"), rows)


def _tenants(readings: Readings, most: int) -> Table:
    found = figures.tenants(readings)
    rows = [
        (
            each.tenant,
            *(_maybe("{:.0f}", value) for value in (each.running, each.waiting)),
            ", ".join(why.replace("_", " ") for why in each.held_back) or NOTHING,
            _maybe("{:,.0f}", each.ahead),
            f"{each.output_per_s:.0f}",
            f"{each.refused_per_s:.1f}",
            f"{each.dollars_per_hour:.2f}",
            _named("{:,.0f} ", each.rates_left),
            _named("${:,.2f} a ", each.budgets_left),
        )
        for each in found[:most]
    ]
    held, rates, budgets = WORDS
    columns = ("run", "wait", held, "ahead", "tokens/s", "refused/s", "$/h", rates, budgets)
    table = _table(("tenant",), columns, rows)
    if len(found) > most:
        table.caption = f"and {len(found) - most} more"
    return table


def _maybe(form: str, value: float | None) -> str:
    return NOTHING if value is None else form.format(value)


def _named(form: str, values: Mapping[str, float]) -> str:
    """All of them, each with its name."""
    return ", ".join(form.format(value) + name for name, value in values.items()) or NOTHING


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _table(names: Sequence[str], columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """In a narrow terminal words give way: a figure that is cut is another figure."""
    table = Table(box=SIMPLE_HEAD, expand=True, padding=0, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="ellipsis")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=name not in WORDS)
    for row in rows:
        table.add_row(*map(_plain, row))
    return table


def _plain(text: str) -> Text:
    return Text(plain(text))


def _pages(url: str, key: str, every: float, tenants: int) -> Iterator[Group]:
    """Raises Unreadable if the server cannot be read at the start; later, it is said."""
    scrapes = deque([fetch(url, key)], WINDOW)
    shown = Group()
    while True:
        time.sleep(every)
        try:
            scrapes.append(fetch(url, key))
            readings = Readings([*scrapes])
            head = f"{url}, the last {readings.seconds:.0f} s"
            shown = page(readings, tenants)
        except Unreadable as error:
            head = f"{error} (what follows is older)"
        yield Group(_plain(head), shown)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="fairstream-top", description=__doc__)
    parser.add_argument("url", metavar="URL", type=metrics_url)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between readings")
    parser.add_argument("--tenants", type=int, default=20, help="most tenants that are shown")
    parser.add_argument("--once", action="store_true", help="print one page of a whole window")
    chosen = parser.parse_args(arguments)
    console = Console()
    pages = _pages(chosen.url, os.environ.get(KEY, ""), max(chosen.every, 0.1), chosen.tenants)
    try:
        if chosen.once:
            *_, whole = islice(pages, WINDOW - 1)
            console.print(whole)
            return
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            for each in pages:
                live.update(each, refresh=True)
    except Unreadable as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()

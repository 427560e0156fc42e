"""`fairstream-top URL`: what a running server does, read from its `/metrics` every two seconds.

The key of an administrator is read from FAIRSTREAM_ADMIN_KEY; addresses in `metrics_from` need
none. It knows the metrics by name; that there are all of them, a test says.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app.telemetry.readings import Readings
from serve_app.telemetry.scraping import KEY, Unreadable, fetch, metrics_url, plain

WINDOW = 6
"""Scrapes, over which rates are taken: processes tell every two seconds, not in step with us."""
STATES = ("requests", "surplus", "bubble", "starved", "spare", "starting")
"""Of a device. All of them are shown but the last, which is over when there is something to see."""
WORDS = ("held back by", "left this minute", "budget left")
"""Columns of several words."""
Key = tuple[str, ...]


def page(readings: Readings, tenants: int) -> Group:
    """The tables. tenants: most rows of the last one."""
    return Group(_models(readings), _engines(readings), _tenants(readings, tenants))


def _models(readings: Readings) -> Table:
    first, gap = "fairstream_first_token_seconds", "fairstream_gap_seconds"
    columns: dict[str, Mapping[Key, str]] = {
        "replicas": _each("{:.0f}", readings.value("fairstream_replicas", "model")),
        "places": _each("{:.0f}", readings.value("fairstream_slots", "model")),
        "free": _each("{:.0f}", readings.value("fairstream_credits", "model")),
        "requests/s": _each("{:.1f}", readings.rate("fairstream_request_seconds_count", "model")),
        "TTFT p50": _each(_seconds, readings.quantile(0.5, first, "model")),
        "TTFT p95": _each(_seconds, readings.quantile(0.95, first, "model")),
        "gap p50": _each(_seconds, readings.quantile(0.5, gap, "model")),
        "gap p95": _each(_seconds, readings.quantile(0.95, gap, "model")),
    }
    return _table(("model",), columns, sorted(readings.value("fairstream_slots", "model")))


def _engines(readings: Readings) -> Table:
    by = ("model", "replica")
    grown = readings.growth("fairstream_gpu_seconds_total", *by, "state")
    engines = sorted(readings.value("fairstream_rows", *by))
    totals = {one: sum(grown.get((*one, state), 0.0) for state in STATES) for one in engines}
    columns: dict[str, Mapping[Key, str]] = {
        state: {
            one: f"{grown.get((*one, state), 0.0) / total:.1%}"
            for one, total in totals.items()
            if total
        }
        for state in STATES[:-1]
    }
    sequences = "fairstream_engine_requests"
    columns |= {
        "run": _each("{:.0f}", readings.value(sequences, *by, state="running")),
        "wait": _each("{:.0f}", readings.value(sequences, *by, state="waiting")),
        "KV": _each("{:.0%}", readings.value("fairstream_kv_usage_ratio", *by)),
        "tokens/s": _each(
            "{:.0f}", readings.rate("fairstream_engine_tokens_total", *by, kind="output")
        ),
    }
    return _table(by, columns, engines)


def _tenants(readings: Readings, most: int) -> Table:
    tokens = readings.rate("fairstream_tokens_total", "tenant", kind="output")
    waiting = readings.value("fairstream_requests_waiting", "tenant")
    refusals = readings.rate("fairstream_refusals_total", "tenant")
    dollars = readings.rate("fairstream_dollars_total", "tenant")
    held = readings.value("fairstream_held_back", "tenant", "reason")
    ahead = readings.value("fairstream_service_ahead", "tenant")
    columns: dict[str, Mapping[Key, str]] = {
        "run": _each("{:.0f}", readings.value("fairstream_requests_running", "tenant")),
        "wait": _each("{:.0f}", waiting),
        "held back by": _named({key: value for key, value in held.items() if value}),
        "ahead": _each("{:,.0f}", ahead),
        "tokens/s": _each("{:.0f}", tokens),
        "refused/s": _each("{:.1f}", refusals),
        "$/h": _each("{:.2f}", {key: 3600 * value for key, value in dollars.items()}),
        "left this minute": _named(
            readings.value("fairstream_rate_left", "tenant", "limit"), "{:,.0f} "
        ),
        "budget left": _named(
            readings.value("fairstream_budget_left_dollars", "tenant", "period"), "${:,.2f} a "
        ),
    }
    figures = (tokens, waiting, refusals)
    known = set().union(*figures)
    shown = sorted(known, key=lambda one: (*(-each.get(one, 0.0) for each in figures), one))
    table = _table(("tenant",), columns, shown[:most])
    if len(shown) > most:
        table.caption = f"and {len(shown) - most} more"
    return table


def _each(form: Any, values: Mapping[Key, float]) -> dict[Key, str]:
    write = form if callable(form) else form.format
    return {key: write(value) for key, value in values.items()}


def _named(values: Mapping[Key, float], form: str = "") -> dict[Key, str]:
    """By tenant: all that it has, each with its name."""
    told: dict[Key, str] = {}
    for (tenant, name), value in sorted(values.items()):
        one = form.format(value) + name.replace("_", " ")
        told[tenant,] = f"{told[tenant,]}, {one}" if (tenant,) in told else one
    return told


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _table(by: Key, columns: Mapping[str, Mapping[Key, str]], rows: list[Key]) -> Table:
    """In a narrow terminal words give way: a figure that is cut is another figure."""
    table = Table(box=SIMPLE_HEAD, expand=True, padding=0, pad_edge=False)
    for name in by:
        table.add_column(name, overflow="ellipsis")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=name not in WORDS)
    for row in rows:
        cells = (*row, *(values.get(row, "-") for values in columns.values()))
        table.add_row(*map(_plain, cells))
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

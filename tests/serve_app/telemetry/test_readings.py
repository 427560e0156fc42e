from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve_app.telemetry.readings import Readings, Scrape, scrape


class Server:
    """Something that is scraped every two seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.scrapes: list[Scrape] = []

    def look(self) -> Readings:
        text = generate_latest(self.registry).decode()
        self.scrapes.append(scrape(text, 2.0 * len(self.scrapes)))
        return Readings(self.scrapes)


def test_rates_are_sums_by_label_over_all_scrapes() -> None:
    server = Server()
    made = Counter("tokens", "", ("tenant", "kind", "ingress"), registry=server.registry)
    for ingress in "ab":
        made.labels("acme", "output", ingress).inc(5)
    server.look()
    server.look()
    for ingress in "ab":
        made.labels("acme", "output", ingress).inc(10)
        made.labels("acme", "prompt", ingress).inc(100)
    found = server.look()
    assert found.seconds == 4
    assert found.rate("tokens_total", "tenant", kind="output") == {("acme",): 5.0}
    assert found.rate("missing", "tenant") == {}


def test_a_counter_that_fell_began_again() -> None:
    before, after = Server(), Server()
    Counter("x", "", registry=before.registry).inc(100)
    before.look()
    Counter("x", "", registry=after.registry).inc(7)
    after.scrapes = before.scrapes
    assert after.look().growth("x_total") == {(): 7.0}


def test_a_series_counts_from_when_it_was_first_seen() -> None:
    """Not from the oldest scrape: a new tenant is seen at once."""
    server = Server()
    made = Counter("x", "", ("tenant",), registry=server.registry)
    server.look()
    made.labels("new").inc(50)
    assert server.look().growth("x_total", "tenant") == {("new",): 0.0}
    made.labels("new").inc(3)
    assert server.look().growth("x_total", "tenant") == {("new",): 3.0}


def test_gauges_are_those_of_now() -> None:
    server = Server()
    made = Gauge("g", "", ("tenant",), registry=server.registry)
    made.labels("a").set(4)
    made.labels("gone").set(1)
    server.look()
    made.remove("gone")
    made.labels("a").set(2)
    assert server.look().value("g", "tenant") == {("a",): 2.0}


def test_quantiles_are_of_what_came_since() -> None:
    server = Server()
    made = Histogram("t", "", ("model",), buckets=(1.0, 2.0, 4.0), registry=server.registry)
    made.labels("old").observe(0.5)
    made.labels("m").observe(0.5)
    server.look()
    for _ in range(10):
        made.labels("m").observe(3.0)
    found = server.look()
    assert found.quantile(0.5, "t", "model") == {("m",): pytest.approx(3.0)}
    assert found.quantile(1.0, "t", "model") == {("m",): pytest.approx(4.0)}
    for _ in range(90):
        made.labels("m").observe(100.0)
    assert server.look().quantile(0.5, "t", "model") == {("m",): 4.0}, "it is above the last bound"


@pytest.mark.parametrize(
    "text",
    ["<!doctype html><p>Hello</p>", '{"a": [1]}', "a{b", "a b c d", 'a{b="1", ="2"} 3'],
)
def test_what_is_no_metrics_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="Prometheus"):
        scrape(text, 0.0)

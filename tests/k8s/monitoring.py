"""Whether rules and dashboards ask for metrics, and labels of them, that somebody exports.

It reads expressions by their words; that they are PromQL it knows by their brackets only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import ray
from ray.util.metrics import Counter, Histogram, Metric

from serve_app.checks.metrics_reference import READY
from serve_app.scaling.log import DecisionLog
from serve_app.telemetry.metrics import AdmissionMetrics, IngressMetrics, ReplicaMetrics
from tests.k8s.manifests import Manifests

OF_RAY = {"application", "deployment", "replica"}
"""Labels that Ray adds to the metrics of a deployment."""
FUNCTIONS = {"sum", "rate", "increase", "absent", "max", "max_over_time", "histogram_quantile"}
WORDS = FUNCTIONS | {"by", "and", "or", "on", "ignoring", "group_left"}
GRAFANA = {
    *("uid", "title", "tags", "timezone", "schemaVersion", "refresh", "time", "from", "to"),
    *("templating", "list", "name", "type", "query", "label", "panels", "id", "description"),
    *("datasource", "gridPos", "h", "w", "x", "y", "fieldConfig", "defaults", "overrides"),
    *("unit", "min", "custom", "fillOpacity", "stacking", "mode"),
    *("targets", "expr", "legendFormat", "refId"),
}
"""Keys of a dashboard that we use."""
BRACKETS = {"(": ")", "{": "}", "[": "]"}


def monitoring_problems(made: Manifests) -> Iterator[str]:
    rules = [
        rule
        for one in made.of("PrometheusRule")
        for group in one["spec"]["groups"]
        for rule in group["rules"]
    ]
    recorded = {rule["record"]: _kept_labels(rule["expr"]) for rule in rules if "record" in rule}
    for rule in rules:
        yield from _problems(rule["expr"], recorded)
        if "alert" in rule and not {"summary", "description"} <= rule["annotations"].keys():
            yield f"{rule['alert']} explains nothing"
        kept = _kept_labels(rule["expr"]) | recorded.get(_name(rule["expr"]), set())
        told = set(re.findall(r"\$labels\.(\w+)", str(rule.get("annotations"))))
        if not told <= kept:
            yield f"{rule.get('alert')} tells labels that are gone: {told - kept}"
    for expr, legend in _panels(made):
        yield from _problems(expr, recorded)
        kept = _kept_labels(expr) | recorded.get(expr, set())
        if not set(re.findall(r"{{(\w+)}}", legend)) <= kept:
            yield f"a legend names labels that are gone: {legend} of {expr}"


def _panels(made: Manifests) -> Iterator[tuple[str, str]]:
    for one in made.of("ConfigMap"):
        for name, text in one["data"].items():
            if name.endswith(".json"):
                board = json.loads(text)
                assert _keys(board) <= GRAFANA, _keys(board) - GRAFANA
                panels = board["panels"]
                places = [tuple(panel["gridPos"].values()) for panel in panels]
                assert len(set(places)) == len({panel["id"] for panel in panels}) == len(panels)
                for panel in panels:
                    yield from ((one["expr"], one["legendFormat"]) for one in panel["targets"])


def _problems(expr: str, recorded: dict[str, set[str]]) -> Iterator[str]:
    if not _is_balanced(expr):
        yield f"brackets do not match: {expr}"
    known = {name: labels | OF_RAY for name, labels in exported().items()} | recorded
    plain = re.sub(r'"[^"]*"', '""', expr)
    names = set(
        re.findall(r"[a-zA-Z_][\w:]*(?=[ ){\[]|$)", re.sub(r"{[^}]*}|\[[^]]*\]", "", plain))
    )
    used = {name for name in names if name not in WORDS and not _is_label(name, plain)}
    if not used:
        yield f"it asks for no metric: {expr}"
    for name in used - known.keys():
        yield f"nobody exports {name}: {expr}"
    offered = set().union(*(known.get(name, set()) for name in used))
    wanted = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", plain)) | _grouped(plain)
    if not wanted <= offered:
        yield f"no such labels: {wanted - offered} in {expr}"
    for name in used:
        counts = name.endswith(("_total", "_bucket"))
        inside = re.search(rf"(rate|increase)\({re.escape(name)}({{[^}}]*}})?\[\d+m\]\)", plain)
        if counts != bool(inside):
            yield f"a counter is read by its rate, and nothing else is: {expr}"


def _keys(value: Any) -> set[str]:
    children = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(children, list):
        return set()
    return set(value if isinstance(value, dict) else ()).union(*map(_keys, children))


def _is_label(name: str, expr: str) -> bool:
    return name in _grouped(expr)


def _grouped(expr: str) -> set[str]:
    lists = re.findall(r"\b(?:by|on|ignoring|group_left)\s*\(([^)]*)\)", expr)
    return {name.strip() for one in lists for name in one.split(",") if name.strip()}


def _kept_labels(expr: str) -> set[str]:
    """Labels of what comes out: those that sums are taken by."""
    lists = re.findall(r"\bby\s*\(([^)]*)\)", expr)
    return {name.strip() for one in lists for name in one.split(",")}


def _name(expr: str) -> str:
    return re.split(r"[ {(]", expr)[0]


def _is_balanced(expr: str) -> bool:
    awaited = []
    for character in expr:
        if character in BRACKETS:
            awaited.append(BRACKETS[character])
        elif character in BRACKETS.values() and (not awaited or awaited.pop() != character):
            return False
    return not awaited


@cache
def exported() -> dict[str, set[str]]:
    """Metrics that Prometheus sees, and their own labels."""
    decisions = vars(DecisionLog())
    ours = (AdmissionMetrics(), IngressMetrics(), ReplicaMetrics(READY))
    parts = [getattr(part, "_told", None) for each in ours for part in vars(each).values()]
    parts += [*decisions["_gauges"].values(), *decisions.values()]
    named = {_exported_as(one): one for one in parts if isinstance(one, Metric)}
    found = {
        name: set(one.info["tag_keys"]) | ({"le"} if isinstance(one, Histogram) else set())
        for name, one in named.items()
    }
    return found | {name: set() for name in _of_serve()}


def _exported_as(metric: Metric) -> str:
    """Of a histogram, what quantiles are read from."""
    endings = {Counter: "_total", Histogram: "_bucket"}
    ending = next((end for kind, end in endings.items() if isinstance(metric, kind)), "")
    return f"ray_{metric.info['name']}{ending}"


def _of_serve() -> Iterator[str]:
    """Counters that Ray Serve exports by itself, out of its source."""
    for path in (Path(ray.__file__).parent / "serve/_private").glob("*.py"):
        for name in re.findall(r"Counter\(\s*\"(serve_\w+)\"", path.read_text()):
            yield f"ray_{name}_total"

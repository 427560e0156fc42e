"""Writes the reference of all metrics from where they are declared:

python -m serve_app.checks.metrics_reference > docs/metrics.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from replica.messages import Ready
from serve_app.telemetry.exposition import ALIASES
from serve_app.telemetry.instruments import MAX_TENANTS, OTHER, Declared
from serve_app.telemetry.metrics import AdmissionMetrics, IngressMetrics, ReplicaMetrics

HEAD = f"""# Metrics

Every metric, as the code has it: `python -m serve_app.checks.metrics_reference` writes this page.

`GET /metrics` tells all of them in one text for Prometheus, whichever front end answers, to who has
a key under `admin_keys` or comes from an address in `metrics_from`. Figures are those of a moment
ago: processes tell theirs every two seconds, and one that has told nothing for 15 s is left out.
Ray exports the same as `ray_fairstream_...` on its own port, every ten seconds, with the labels
`application`, `deployment` and `replica`; there is no histogram of gaps there.

At most {MAX_TENANTS} tenants have series of their own, those that came first; what is counted of
all others stands under the tenant `{OTHER}`, and they have no gauges. A tenant has series from its
first request on. Histograms have `_bucket`, `_sum` and `_count` behind their names.
"""
NAMES = """
## Under vLLM's names

With `vllm_metrics: true` the same figures stand there once more, for dashboards that were made for
vLLM and for the endpoint pickers of the Gateway API inference extension. Those of an engine have
the labels `engine`, our replica, and `model_name`; the others `model_name`.

| vLLM's | ours |
|---|---|
"""
READY = Ready(
    model_type="",
    vocab_size=1,
    eos_token_ids=(),
    max_model_len=1,
    max_rows=1,
    block_size=1,
    num_blocks=1,
)


def reference() -> str:
    """The page, in Markdown."""
    parts = [
        ("Of all requests", "Admission, one for all.", AdmissionMetrics().instruments),
        ("Of a front end", "Label `ingress`: the process.", IngressMetrics().instruments),
        (
            "Of an engine",
            "Labels `replica`: the process; `model`.",
            ReplicaMetrics(READY).instruments,
        ),
    ]
    sections = [_section(title, lead, of.declared) for title, lead, of in parts]
    aliases = [
        f"| `{alias.name}` | `{ours}`{_only(alias.only)} |"
        for ours, several in ALIASES.items()
        for alias in several
    ]
    return "\n".join([HEAD, *sections]) + NAMES + "\n".join(aliases) + "\n"


def _section(title: str, lead: str, declared: Iterable[Declared]) -> str:
    rows = [
        f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {each.meaning} |"
        for each in declared
    ]
    head = "| metric | type | labels | what it tells |\n|---|---|---|---|\n"
    return f"## {title}\n\n{lead}\n\n{head}" + "\n".join(rows) + "\n"


def _only(labels: Mapping[str, str]) -> str:
    told = ", ".join(f'{name}="{value}"' for name, value in labels.items())
    return f", `{told}`" if told else ""


if __name__ == "__main__":
    print(reference(), end="")

"""Pictures of the fairness simulation: service over time, its difference, first tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.sim_trace import Trace

matplotlib.use("Agg")
MANY = 6
"""More tenants than this are drawn without a legend."""


def draw(folder: Path, scenario: str, traces: Mapping[str, Trace]) -> None:
    """One picture per scenario, a row per policy: `SCENARIO.png`."""
    figure = Figure(figsize=(13, 2.6 * len(traces)), layout="constrained")
    axes = figure.subplots(len(traces), 3, squeeze=False)
    for row, (policy, trace) in zip(axes, traces.items(), strict=True):
        _service(row[0], trace)
        row[1].plot(trace.differences(), color="black", linewidth=0.8)
        _first_tokens(row[2], trace)
        row[0].set_ylabel(policy)
    titles = (
        "service by weight, accumulated",
        "largest difference in 60 s",
        "time to first token, s: median and p99",
    )
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=10)
    for axis in axes[-1][:2]:
        axis.set_xlabel("seconds")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{scenario}.png", dpi=80)


def _service(axis: Axes, trace: Trace) -> None:
    for name, line in trace.service().items():
        axis.plot(line / trace.weights[name], label=name, linewidth=0.9)
    if len(trace.weights) <= MANY:
        axis.legend(fontsize=7)


def _first_tokens(axis: Axes, trace: Trace) -> None:
    names = [name for name in trace.weights if trace.ttft[name]]
    for quantile, colour in ((99, "lightgrey"), (50, "grey")):
        heights = [float(np.percentile(trace.ttft[name], quantile)) for name in names]
        axis.bar(range(len(names)), heights, color=colour)
    if len(names) <= MANY:
        axis.set_xticks(range(len(names)), names, fontsize=7)
    else:
        axis.set_xticks([])

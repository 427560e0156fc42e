"""Pictures of the scaling simulation: the load and the replicas that were there for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from benchmarks.scale_run import Course
from benchmarks.scale_scenarios import Scenario

matplotlib.use("Agg")
POINTS = 600


def draw(folder: Path, name: str, scenario: Scenario, courses: Mapping[str, Course]) -> None:
    """`NAME.png`: replicas above, answers that broke the SLO below."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    gpu_s = np.array([tenant.gpu_s for tenant in scenario.tenants])
    load = scenario.rates @ gpu_s
    every = max(len(load) // POINTS, 1)
    minutes = np.arange(len(load))[::every] / 60
    above.fill_between(minutes, load[::every], color="lightgrey", label="load")
    for policy, course in courses.items():
        above.plot(minutes, course.ready[::every], linewidth=0.9, label=policy)
        below.plot(minutes, course.misses[::every], linewidth=0.9, label=policy)
    for start, end in scenario.lost:
        above.axvspan(start / 60, end / 60, color="mistyrose", label="no metrics")
    above.set_ylabel("replicas")
    below.set_ylabel("SLO misses, accumulated")
    below.set_xlabel("minutes")
    above.legend(fontsize=7)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=80)

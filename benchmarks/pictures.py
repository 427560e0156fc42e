"""The two pictures of the README, as SVG files that can be read on light and dark pages.

`overlap.svg` is drawn to scale from `benchmarks/results/overlap.json`. `flood.svg` is one run of
the fairness simulation (`benchmarks.fair_simulation`) with and without the fair order.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.fair_simulation import ours
from benchmarks.sim_engine import Policy, Simulation
from benchmarks.sim_policies import Fcfs
from benchmarks.sim_scenarios import Scenario, scenarios
from benchmarks.svg import BLUE, ORANGE, RED, TEXT, WIDTH, svg, words
from router.policy import FairPolicy

RESULT = Path("benchmarks/results/overlap.json")
SHAPE = "llama-1b"
LEFT, STEPS, FLOOD_AT_S = 150, 4, 30.0
Dot = tuple[float, float]


def bar(x: float, y: float, width: float, colour: str, text: str = "") -> str:
    box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" rx="2" fill="{colour}"/>'
    if not text:
        return box
    return box + words(x + width / 2, y + 15, text, 'fill="white" text-anchor="middle"')


def overlap(figures: Mapping[str, float]) -> str:
    """Four steps on the CPU and the GPU without overlap, and the same with it below."""
    scale = (WIDTH - LEFT - 20) / (STEPS * figures[f"step_ms.off.{SHAPE}"])
    parts = []
    for top, mode, label in ((8, "off", "in turn"), (100, "on", "overlapped")):
        step_ms = figures[f"step_ms.{mode}.{SHAPE}"]
        bubble = figures[f"bubble_share.{mode}.{SHAPE}"]
        idle, step = step_ms * bubble * scale, step_ms * scale
        host = figures[f"host_ms.32.{mode}.{SHAPE}"] * scale
        parts += [words(0, top + 15, label, 'font-weight="600"')]
        parts += [words(LEFT - 40, top + 15, "CPU"), words(LEFT - 40, top + 43, "GPU")]
        for number in range(STEPS):
            x = LEFT + number * step
            prepared = number + 1 if mode == "off" else number + 2
            parts.append(bar(x, top, host, ORANGE, str(prepared)))
            parts.append(bar(x + idle, top + 28, step - idle, BLUE, f"step {number + 1}"))
            if mode == "off":
                parts.append(bar(x, top + 28, idle, RED))
        told = f"{step_ms:.2f} ms a step, the GPU idle for {100 * bubble:.2g}% of the time"
        parts.append(words(LEFT, top + 70, told))
    for place, (colour, meaning) in enumerate(
        ((ORANGE, "CPU prepares step n"), (BLUE, "GPU runs step n"), (RED, "GPU waits for the CPU"))
    ):
        x = LEFT + place * 190
        parts.append(f'<rect x="{x}" y="190" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(words(x + 18, 201, meaning))
    return svg(210, "Four decode steps, without and with overlap", parts)


def flood(times: Mapping[str, list[Dot]], seconds: float) -> str:
    """Dots (sent at s, first token after s), by policy."""
    height, bottom = 260, 214
    highest = max(wait for dots in times.values() for _, wait in dots)
    across, up = (WIDTH - 80) / seconds, (bottom - 30) / highest
    line = f'stroke="{TEXT}" stroke-width="1"'
    begin = 50 + FLOOD_AT_S * across
    parts = [
        words(0, 14, "a small tenant's seconds to the first token"),
        f'<path d="M50 22 V{bottom} H{WIDTH - 20}" fill="none" {line}/>',
        f'<path d="M{begin:.0f} 22 V{bottom}" stroke-dasharray="4 4" {line}/>',
        words(begin + 8, 130, "another tenant's flood begins"),
        words(WIDTH - 20, bottom + 18, f"{seconds:.0f} s", 'text-anchor="end"'),
        words(50, bottom + 18, "0"),
    ]
    parts += [
        words(42, bottom - wait * up + 4, str(wait), 'text-anchor="end"')
        for wait in range(0, int(highest) + 1, 5)
    ]
    for place, (name, dots) in enumerate(times.items()):
        colour = (ORANGE, BLUE)[place]
        path = "".join(f"M{50 + at * across:.1f} {bottom - wait * up:.1f}h0" for at, wait in dots)
        parts.append(
            f'<path d="{path}" stroke="{colour}" stroke-width="5" stroke-linecap="round"/>'
        )
        x = 50 + place * 260
        parts.append(f'<circle cx="{x + 5}" cy="{height - 12}" r="5" fill="{colour}"/>')
        parts.append(words(x + 16, height - 8, name))
    return svg(height, "Time to a small tenant's first token when another one floods", parts)


def flooded(seconds: float) -> Scenario:
    """One H200 with 256 rows, a tenant with two requests a second, and a flood of 600 at once."""
    known = scenarios(seed=1)["victim"]
    clients = known.clients | {"flood": replace(known.clients["flood"], starts_at=FLOOD_AT_S)}
    return replace(known, clients=clients, seconds=seconds)


def first_tokens(scenario: Scenario, policy: Policy) -> list[Dot]:
    """Of the victim's requests, in the order in which they were sent."""
    jobs = scenario.arrivals()
    Simulation(scenario.model, policy, jobs, scenario.again()).run(scenario.seconds)
    answered = [job for job in jobs if job.tenant == "victim" and job.first]
    return [(job.arrival, job.first - job.arrival) for job in answered]


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    options.add_argument("--folder", type=Path, default=Path("docs/pictures"))
    options.add_argument("--seconds", type=float, default=150.0, help="length of the flood's run")
    chosen = options.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    figures = json.loads(RESULT.read_text())["figures"]
    (chosen.folder / "overlap.svg").write_text(overlap(figures))
    scenario = flooded(chosen.seconds)
    times = {
        "first come, first served": first_tokens(scenario, Fcfs(scenario.model.rows)),
        "fairstream's order": first_tokens(scenario, ours(scenario, FairPolicy())),
    }
    (chosen.folder / "flood.svg").write_text(flood(times, chosen.seconds))


if __name__ == "__main__":
    main()

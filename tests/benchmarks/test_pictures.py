"""The README's pictures are those of the results that lie in the repository."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.pictures import first_tokens, flood, flooded, overlap
from benchmarks.sim_policies import Fcfs

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


def test_the_timeline_is_drawn_from_the_result_file() -> None:
    figures = json.loads((ROOT / "benchmarks/results/overlap.json").read_text())["figures"]
    assert overlap(figures) == (PICTURES / "overlap.svg").read_text()


def test_the_flood_is_drawn_from_times_to_first_tokens() -> None:
    scenario = flooded(40)
    dots = first_tokens(scenario, Fcfs(scenario.model.rows))
    assert max(wait for sent, wait in dots if sent < 20) < 1 < max(wait for _, wait in dots)
    picture = ElementTree.fromstring(flood({"fcfs": dots}, 40))
    assert "fcfs" in {element.text for element in picture.iter()}

"""The benchmark of timelines in its short form, on a CPU."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import torch

from benchmarks.timeline import main
from benchmarks.timeline_picture import LANES, read
from tests import timelines

SHORT = ["--shape", "small", "--device", "cpu", "--rows", "4", "--prompt", "48", "--answer", "16"]
SHORT += ["--steps", "40", "--traced", "40", "--runs", "1"]


def test_both_modes_are_measured_traced_and_drawn(tmp_path, monkeypatch) -> None:
    threads = torch.get_num_threads()
    main([*SHORT, "--traces", str(tmp_path), "--json", str(tmp_path / "timeline.json")])
    torch.set_num_threads(threads)
    figures = json.loads((tmp_path / "timeline.json").read_text())["figures"]
    for mode in ("on", "off"):
        for kind in ("decode", "mixed"):
            assert figures[f"step_ms.{kind}.{mode}"] > 0
            assert 0 <= figures[f"no_kernel_share.{kind}.{mode}"] < 1
            assert 0 <= figures[f"bubble_share.{kind}.{mode}"] < 1
        assert figures[f"tokens_per_s.{mode}"] > 0
        path = tmp_path / f"timeline-{mode}.json.gz"
        timelines.check(read(path))
        again = tmp_path / "again.svg"
        main(["--draw", str(path), str(again)])
        assert again.read_text() == (tmp_path / f"timeline-{mode}.svg").read_text()
        words = {element.text for element in ElementTree.fromstring(again.read_text()).iter()}
        assert words >= {*LANES, "bubble", "gap between kernels"}
    assert figures["bubble_share.off"] > figures["bubble_share.on"]

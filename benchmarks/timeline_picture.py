"""A few steps of a timeline (`fairstream-trace`) as a picture, one of them with prompt chunks if
there is one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.svg import BLUE, ORANGE, RED, TEXT, WIDTH, svg, words
from replica.timeline import chrome

LANES = chrome.LANES[: chrome.LANES.index("hazards")]
"""Hazards are named in the trace, and what lies outside of the streams is one."""
PALE = "#e3a6a2"
COLOURS = {
    "slot A": BLUE,
    "slot B": ORANGE,
    "bubble": RED,
    "no kernel runs": PALE,
    "wait": "#b9c2cc",
}
"""By how names begin. All else is grey."""
LEFT, ROW, TOP = 130, 26, 34
SPACE = WIDTH - LEFT - 10
NARROW, WIDE = 0.6, 110
"""Slices nearer to each other than so many units are drawn as one; one wider than so many has room
for its kind."""
Timeline = dict[str, Any]


class Box(NamedTuple):
    lane: str
    name: str
    start: float
    end: float


def read(path: Path) -> Timeline:
    """Of a file that may be compressed."""
    data = path.read_bytes()
    found: Timeline = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found


def draw(timeline: Timeline, steps: int = 6) -> str:
    """SVG. steps: that are shown."""
    boxes = list(_boxes(timeline))
    computed = [box for box in boxes if box.lane == "compute"]
    first = _first(timeline, steps)
    shown = computed[first : first + steps]
    begin, end = shown[0].start, shown[-1].end
    begin -= (end - begin) / 50
    parts = [words(0, 14, timeline["otherData"]["engine"], 'font-weight="600"')]
    for number, lane in enumerate(LANES):
        y = TOP + ROW * number
        parts.append(words(0, y + 15, lane))
        found = [box for box in boxes if box.lane == lane and begin < box.end and box.start < end]
        parts += [_rectangle(y, box, begin, end) for box in _joined(found, (end - begin) / SPACE)]
    bottom = TOP + ROW * len(LANES) + 14
    parts.append(words(LEFT, bottom, f"{(end - begin) / 1e3:.2f} ms"))
    parts += _legend(bottom)
    return svg(bottom + 12, f"{steps} steps of an engine", parts)


def _first(timeline: Timeline, steps: int) -> int:
    """From where on steps are shown: a mixed one is the third of them, if there is one later than
    those with which the trace began."""
    kinds = [each["args"]["kind"] for each in _slices(timeline) if "kind" in each.get("args", {})]
    mixed = [place for place, kind in enumerate(kinds) if kind.startswith("mixed")]
    last = max(len(kinds) - steps, 0)
    return min(next((place - 2 for place in mixed if place > 8), 2), last)


def _slices(timeline: Timeline) -> list[dict[str, Any]]:
    found = [event for event in timeline["traceEvents"] if event["ph"] == "X"]
    return sorted(found, key=lambda event: float(event["ts"]))


def _boxes(timeline: Timeline) -> Iterator[Box]:
    events = timeline["traceEvents"]
    lanes = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    for each in _slices(timeline):
        kind = each.get("args", {}).get("kind", "")
        name = f"{each['name']} {kind}".strip()
        yield Box(lanes[each["tid"]], name, each["ts"], each["ts"] + each["dur"])


def _joined(boxes: Iterable[Box], unit: float) -> Iterator[Box]:
    """Those of one colour that nobody could tell apart. unit: microseconds of a unit's width."""
    held: Box | None = None
    for box in boxes:
        if held and _colour(held) == _colour(box) and box.start - held.end < NARROW * unit:
            held = held._replace(end=max(held.end, box.end))
            continue
        if held:
            yield held
        held = box
    if held:
        yield held


def _colour(box: Box) -> str:
    return next((c for name, c in COLOURS.items() if box.name.startswith(name)), TEXT)


def _rectangle(y: float, box: Box, begin: float, end: float) -> str:
    scale = SPACE / (end - begin)
    x, right = (LEFT + (max(begin, min(end, at)) - begin) * scale for at in (box.start, box.end))
    width = max(right - x, 0.3)
    drawn = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 4}" fill="{_colour(box)}"/>'
    )
    if box.lane != "compute" or width < 40:
        return drawn
    number, _, kind = box.name.partition("step ")[2].partition(" ")
    label = f"{number} {kind}" if width > WIDE else number
    return drawn + words(x + width / 2, y + 15, label, 'fill="white" text-anchor="middle"')


def _legend(y: float) -> Iterator[str]:
    meanings = (
        (BLUE, "slot A"),
        (ORANGE, "slot B"),
        (RED, "bubble"),
        (PALE, "gap between kernels"),
    )
    for place, (colour, meaning) in enumerate(meanings):
        x = LEFT + 160 + place * 120
        yield f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{colour}"/>'
        yield words(x + 18, y, meaning)

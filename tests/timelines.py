"""What holds for every timeline, and what can be read from one."""

from __future__ import annotations

from collections import Counter
from typing import Any

Timeline = dict[str, Any]
BOTH_ENDS = (("b", "e"), ("s", "f"))
"""Kinds of events of which one does not come without the other."""


def check(timeline: Timeline) -> None:
    """It is what Chrome's format and Perfetto ask for."""
    events = timeline["traceEvents"]
    lanes = lane_names(timeline)
    for event in events:
        assert event["ph"] in "XMbestfi", event
        assert event["name"].strip(), event
        assert isinstance(event["pid"], int), event
        assert event["tid"] in lanes, event
        assert event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
    for first, last in BOTH_ENDS:
        begun = Counter(event["id"] for event in events if event["ph"] == first)
        assert begun == Counter(event["id"] for event in events if event["ph"] == last)
        assert set(begun.values()) <= {1}
    _check_slices(events)
    _check_arrows(events)


def _check_slices(events: list[Timeline]) -> None:
    """No slice overlaps another one of its lane: viewers would put one into the other."""
    until: dict[int, int] = {}
    for event in sorted(of_kind(events, "X"), key=lambda event: event["ts"]):
        begin, lasts = (round(1000 * event[name]) for name in ("ts", "dur"))  # as viewers count
        assert begin >= until.get(event["tid"], 0), event
        until[event["tid"]] = begin + lasts


def _check_arrows(events: list[Timeline]) -> None:
    """Each end lies in a slice, else no viewer draws it."""
    slices = of_kind(events, "X")
    for event in events:
        if event["ph"] in "stf":
            around = [one for one in slices if one["tid"] == event["tid"]]
            at = event["ts"]
            assert any(one["ts"] - 0.002 <= at <= one["ts"] + one["dur"] + 0.002 for one in around)


def lane_names(timeline: Timeline) -> dict[int, str]:
    events = timeline["traceEvents"]
    return {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}


def of_kind(events: list[Timeline], kind: str) -> list[Timeline]:
    return [event for event in events if event["ph"] == kind]


def lane(timeline: Timeline, name: str) -> list[Timeline]:
    """The slices of a lane, in order of time."""
    [number] = [key for key, value in lane_names(timeline).items() if value == name]
    found = [each for each in of_kind(timeline["traceEvents"], "X") if each["tid"] == number]
    return sorted(found, key=lambda event: event["ts"])

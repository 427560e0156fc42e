from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.text.stop_strings import StopStrings

TEXTS = st.text("ab", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def one_shot(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, bool]:
    """The definition: the shortest beginning of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - len(max(found, key=len))], True
    return text, False


def piecewise(
    text: str, stops: tuple[str, ...], include: bool, draw: random.Random
) -> tuple[str, bool]:
    follower, out, start = StopStrings(stops, include), [], 0
    while start < len(text) and not follower.matched:
        end = start + draw.randint(1, 4)
        out.append(follower.push(text[start:end]))
        start = end
    return "".join(out) + follower.finish(), follower.matched


@settings(max_examples=400)
@given(TEXTS, STOPS, st.booleans(), st.randoms(use_true_random=False))
@example("abaabab", ("abab",), False, random.Random(0))
@example("ab", ("b", "ab"), False, random.Random(0))
@example("aabcd", ("abcd", "bc"), False, random.Random(0))
def test_pieces_give_the_same_as_the_whole_text(
    text: str, stops: tuple[str, ...], include: bool, draw: random.Random
) -> None:
    assert piecewise(text, stops, include, draw) == one_shot(text, stops, include)


@given(TEXTS, STOPS)
def test_only_a_beginning_of_a_stop_string_is_held(text: str, stops: tuple[str, ...]) -> None:
    follower = StopStrings(stops)
    out = follower.push(text)
    if not follower.matched:
        held = text[len(out) :]
        longer = [text[start:] for start in range(len(out))]
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(tail) for stop in stops for tail in longer)


@pytest.mark.parametrize(
    ("stops", "include", "expected"),
    [
        (("END",), False, "the "),
        (("END",), True, "the END"),
        (("END", "e END"), False, "th"),
        (("e",), False, "th"),
        (("nowhere",), False, "the END is"),
    ],
)
def test_where_it_cuts(stops: tuple[str, ...], include: bool, expected: str) -> None:
    assert piecewise("the END is", stops, include, random.Random(0))[0] == expected

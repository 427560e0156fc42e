from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.protocol.json_parts import MAX_PARTS, MAX_VALUES, Allowance, Parts, at_most, exactly

TEXTS = st.text('a,:[{"\\}]\n€', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def counted(value: Any) -> Parts:
    """The same by walking through what was read; an empty list or object has no comma."""
    match value:
        case str():
            return Parts(1, 0)
        case dict():
            inner = [counted(each) for each in value.values()]
            own, commas = 1 + 2 * len(value), max(len(value) - 1, 0)
        case list():
            inner = list(map(counted, value))
            own, commas = 1, max(len(value) - 1, 0)
        case _:
            return Parts(0, 0)
    return Parts(own + sum(p for p, _ in inner), commas + sum(v for _, v in inner))


@given(VALUES, st.booleans())
def test_marks_within_strings_do_not_count(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    parts, commas = counted(value)
    assert exactly(text) == Parts(parts, commas + 1)
    assert at_most(text) >= exactly(text)


@given(VALUES)
def test_what_holds_little_is_covered(value: Any) -> None:
    assert Allowance().covers(json.dumps(value).encode())


@pytest.mark.parametrize("one", ['"a"', "[]", "{}", '{"a": 1}'])
def test_what_holds_too_many_parts_is_not_covered(one: str) -> None:
    text = "[" + ", ".join([one] * MAX_PARTS) + "]"
    assert not Allowance().covers(text.encode())


def test_what_holds_too_many_numbers_is_not_covered() -> None:
    numbers = ["1"] * MAX_VALUES
    assert Allowance().covers(f"[{','.join(numbers)}]".encode())
    assert not Allowance().covers(f"[1,{','.join(numbers)}]".encode())


@pytest.mark.parametrize("text", ['{"a": [1, 2], "b": "c"}', '\\"{[:,', "\\\\\\\"'{[:,"])
def test_a_string_may_hold_any_number_of_marks(text: str) -> None:
    """Code and tables are full of them."""
    body = json.dumps({"content": text * 200_000}).encode()
    assert at_most(body).parts > MAX_PARTS or at_most(body).values > MAX_VALUES / 4
    assert Allowance().covers(body)


def test_several_texts_have_one_allowance() -> None:
    allowance, text = Allowance(), ("[" + "[]," * (MAX_PARTS // 3) + "[]]").encode()
    assert [allowance.covers(text) for _ in range(4)] == [True, True, False, False]
    assert allowance.covers(b"[]")

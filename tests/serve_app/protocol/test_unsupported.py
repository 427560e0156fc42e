from __future__ import annotations

import pytest

from serve_app.protocol.unsupported import (
    CHAT,
    COMPLETION,
    IGNORED,
    MESSAGE,
    Table,
    first_unsupported,
)


@pytest.mark.parametrize("table", [CHAT, COMPLETION, MESSAGE])
def test_null_and_the_neutral_values_ask_for_nothing(table: Table) -> None:
    assert first_unsupported(dict.fromkeys(table), table) is None
    for name, neutral in table.items():
        for value in neutral:
            assert first_unsupported({name: value}, table) is None


@pytest.mark.parametrize("table", [CHAT, COMPLETION, MESSAGE])
def test_every_other_value_is_found(table: Table) -> None:
    for name in table:
        assert first_unsupported({"other": 1, name: {"some": "thing"}}, table) == name


def test_false_is_not_zero() -> None:
    table: Table = {"number": (0,), "flag": (False,)}
    assert first_unsupported({"number": False}, table) == "number"
    assert first_unsupported({"number": 0.0}, table) is None
    assert first_unsupported({"flag": 0}, table) == "flag"


def test_what_is_refused_needs_no_warning() -> None:
    assert set(CHAT) | set(COMPLETION) <= IGNORED

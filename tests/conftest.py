from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        type=int,
        default=60,
        help="random schedules of the race suite (the long form is 1000)",
    )

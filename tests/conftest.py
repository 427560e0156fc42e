from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# A time limit per example would make a property depend on how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        type=int,
        default=60,
        help="random schedules of the race suite (the long form is 1000)",
    )
    parser.addoption(
        "--kills",
        type=int,
        default=1,
        help="processes killed, of each kind, by the crash suite (the long form is 20)",
    )
    parser.addoption(
        "--typos",
        type=int,
        default=2,
        help="keys misspelt in each file of k8s/ (the long form is 1000)",
    )
    parser.addoption(
        "--long", action="store_true", help="also the tests that take minutes, marked so"
    )
    parser.addoption(
        "--crd-schemas",
        help="folder of custom resource definitions, as JSON, for tests/k8s"
        " (or FAIRSTREAM_CRD_SCHEMAS in the environment)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lacking = {}
    if not torch.cuda.is_available():
        lacking["gpu"] = "there is no GPU"
    if not config.getoption("--long"):
        lacking["long"] = "it takes minutes: see --long"
    for item in items:
        for mark, reason in lacking.items():
            if item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

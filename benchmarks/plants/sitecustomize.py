"""Slows one part of the server down, in every process that has this folder in PYTHONPATH.

Python imports this module at its start. FAIRSTREAM_PLANT names what is planted; the part is changed
once it was imported, so that nothing else notices.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TOKENIZER_S, PADDING_S = 0.6, 0.005


def delayed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """It takes the CPU for so long before it begins."""

    @wraps(function)
    def slow(*arguments: Any, **options: Any) -> Any:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return function(*arguments, **options)

    return slow


def slow_tokenizer(module: ModuleType) -> None:
    module.encoded = delayed(module.encoded, TOKENIZER_S)  # type: ignore[attr-defined]


def host_padding(module: ModuleType) -> None:
    scheduler = module.Scheduler
    scheduler.schedule = delayed(scheduler.schedule, PADDING_S)


PLANTS = {
    "slow_tokenizer": ("serve_app.text.special_tokens", slow_tokenizer),
    "host_padding": ("replica.scheduling.scheduler", host_padding),
}


class Planter(MetaPathFinder):
    """Finds one module where it is, and changes it behind its import."""

    def __init__(self, module: str, plant: Callable[[ModuleType], None]) -> None:
        self._module, self._plant = module, plant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._plant(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if (name := os.environ.get("FAIRSTREAM_PLANT", "")) in PLANTS:
    sys.meta_path.insert(0, Planter(*PLANTS[name]))

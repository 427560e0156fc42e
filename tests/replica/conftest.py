from __future__ import annotations

from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from replica.config import EngineConfig
from replica.model.cpu.library import NoLibrary, load
from tests.models import save_tiny
from tests.script import Bench, ScriptRunner


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Small models lose more by waking threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernels() -> CDLL:
    """The C++ kernels, from the folder where the servers of other tests keep theirs."""
    try:
        return load(EngineConfig.cache_dir)
    except NoLibrary as reason:
        pytest.skip(f"no kernels of ours here: {reason}")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """The folder of TINY, to be changed."""
    return save_tiny(tmp_path / "tiny")


@pytest.fixture
def bench():
    """Makes engines with a scripted model, and closes them."""
    made: list[Bench] = []

    def make(runner: ScriptRunner | None = None, **options: object) -> Bench:
        made.append(Bench(runner or ScriptRunner(), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()

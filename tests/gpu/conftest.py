"""Everything in this folder needs a GPU: `tests/gpu/run.sh` runs it on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.engines import BLOCK, BLOCKS, COUNT
from tests.models import save_tiny
from tests.oracle import Oracle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device():
    from replica.device.cuda import CudaDevice

    return CudaDevice()


@pytest.fixture(scope="session")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle(save_tiny(tmp_path_factory.mktemp("tiny"), seed=3), COUNT)


@pytest.fixture(scope="session")
def runner(oracle, device):
    import torch

    from replica.model.loading import load_decoder
    from replica.model.runner import DecoderRunner

    decoder = load_decoder(oracle.folder, None, torch.float32, device.memory)
    made = DecoderRunner(decoder, BLOCKS, BLOCK)
    made.cache.layers.fill_(torch.nan)
    return made

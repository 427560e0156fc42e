from __future__ import annotations

import pytest
import torch

from replica.device.gpu_trace import GpuProfiler


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is profiling here")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_without_profiling_a_trace_fails_by_the_error_that_an_engine_expects() -> None:
    with pytest.raises(RuntimeError, match="does not profile here"):
        GpuProfiler([])

from __future__ import annotations

import pytest

from replica.config import EngineConfig


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_rows": 0}, "max_rows must be at least 1, not 0"),
        ({"kv_tokens": 0}, "kv_tokens must be at least 1, not 0"),
        ({"kv_tokens": 8}, "hold at least one block"),
        ({"max_rows": 8, "max_step_tokens": 7}, "every running row takes one token"),
        ({"graph_sizes": (1, 17)}, r"graph_sizes must lie in \[1, 16\]"),
        ({"graph_sizes": (0,)}, "graph_sizes"),
        ({"memory_fraction": 1.0}, "memory_fraction"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(model="any", **options)


def test_the_kv_pool_has_a_default_on_a_cpu_and_is_measured_on_a_gpu():
    assert EngineConfig(model="any").num_blocks == 1024
    assert EngineConfig(model="any", device="cuda", kv_tokens=640).num_blocks == 40
    with pytest.raises(ValueError, match="not known before"):
        _ = EngineConfig(model="any", device="cuda").num_blocks

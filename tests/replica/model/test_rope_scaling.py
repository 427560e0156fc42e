"""Rotary angles beside those that transformers makes of the same numbers."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from replica.model.loading import load_spec
from replica.model.rope_scaling import rotary
from replica.model.unsupported import UnsupportedModel
from tests.models import save_tiny

LONG = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
CASES = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": None},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.5, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 0.5},
    {"rope_type": "longrope", **LONG},
    {"rope_type": "longrope", "factor": 8.0, **LONG},
    {"rope_type": "longrope", "attention_factor": 1.5, **LONG},
]
PRETRAINED, MAX_POSITION, HEAD_DIM = 128, 512, 8


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_and_magnitude_are_those_of_transformers(case: dict[str, Any]) -> None:
    parameters = {"rope_theta": 500.0, "original_max_position_embeddings": PRETRAINED, **case}
    config = LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITION, rope_parameters=dict(parameters)
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[case["rope_type"]](config)
    found = rotary(HEAD_DIM, parameters, MAX_POSITION)
    torch.testing.assert_close(torch.tensor(found.frequencies), frequencies, rtol=1e-6, atol=0)
    assert found.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize(
    ("case", "longest"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 8.0}, 1024),
        ({"rope_type": "longrope", **LONG}, 128),
    ],
    ids=str,
)
def test_angles_hold_for_as_long_as_they_depend_on_positions_alone(
    case: dict[str, Any], longest: int
) -> None:
    parameters = {"rope_theta": 500.0, "original_max_position_embeddings": PRETRAINED, **case}
    assert rotary(HEAD_DIM, parameters, MAX_POSITION).max_position == longest


def test_a_model_with_other_angles_for_long_sequences_is_served_up_to_them(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    folder = save_tiny(
        tmp_path, "phi3", rope_parameters=parameters, original_max_position_embeddings=64
    )
    caplog.clear()
    assert load_spec(folder).max_position == 64
    assert "up to 64 tokens are served, of 512" in caplog.text


NAMES = (
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "mscale", "odd",
    "mscale_all_dim", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor",
    "short_factor", "truncate",
)  # fmt: skip
VALUES = st.sampled_from(["yarn", "longrope", "llama3", "default", None, [1.0] * 4, 10**400])


@given(st.dictionaries(st.sampled_from(NAMES), VALUES | st.floats() | st.integers()))
@example({"rope_type": [1.0]})
def test_any_numbers_give_finite_angles_or_a_refusal(parameters: dict[str, Any]) -> None:
    with contextlib.suppress(UnsupportedModel):
        found = rotary(HEAD_DIM, {"rope_theta": 500.0} | parameters, MAX_POSITION)
        assert all(map(math.isfinite, (*found.frequencies, found.magnitude)))

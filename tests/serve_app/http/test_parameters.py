from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.messages import Sampling
from serve_app.http.parameters import check_prompt, sampling
from serve_app.protocol.errors import ApiError
from serve_app.protocol.limits import Limits
from serve_app.protocol.requests import ChatRequest, CompletionRequest
from tests.serve_app.text_backend import MODEL

LIMITS = Limits(default_max_tokens=50)


def sampled(prompt_tokens: int = 10, **fields: Any) -> Sampling:
    request = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    )
    return sampling(request, prompt_tokens, MODEL, LIMITS)


def test_what_is_not_given_is_openais_default() -> None:
    got = sampled(seed=0)
    assert got == Sampling(max_tokens=50, temperature=1.0, top_k=0, top_p=1.0, seed=0)


def test_the_default_temperature_is_the_applications() -> None:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "x"})
    named = CompletionRequest.model_validate({"model": "m", "prompt": "x", "temperature": 0.5})
    limits = Limits(default_temperature=0.0)
    assert sampling(request, 10, MODEL, limits).temperature == 0
    assert sampling(named, 10, MODEL, limits).temperature == 0.5


@given(st.integers(1, 199), st.integers(1, 10**12), st.integers(0, 10**12))
def test_the_output_ends_with_the_context(prompt: int, most: int, least: int) -> None:
    """C31, C07."""
    if least > most:
        with pytest.raises(ApiError, match="min_tokens"):
            sampled(prompt, max_tokens=most, min_tokens=least)
        return
    got = sampled(prompt, max_tokens=most, min_tokens=least)
    assert got.max_tokens == min(most, MODEL.max_model_len - prompt)
    assert got.min_tokens == min(least, got.max_tokens)


def test_each_endpoint_has_its_default_length() -> None:
    """C31."""
    request = CompletionRequest.model_validate({"model": "m", "prompt": "x"})
    assert sampling(request, 10, MODEL, LIMITS).max_tokens == 16
    assert sampled().max_tokens == 50
    assert sampled(190).max_tokens == 10


@pytest.mark.parametrize(
    ("fields", "top_k", "top_p"),
    [
        ({"top_k": -1}, 0, 1.0),
        ({"top_k": 5, "top_p": 0.5}, 5, 0.5),
        ({"top_k": 10**9}, 300, 1.0),
        ({"top_p": 0}, 1, 1.0),
        ({"top_p": 0, "top_k": 7}, 1, 1.0),
    ],
)
def test_truncation(fields: dict[str, Any], top_k: int, top_p: float) -> None:
    """R04, X6."""
    got = sampled(**fields)
    assert (got.top_k, got.top_p) == (top_k, top_p)


@pytest.mark.parametrize(
    ("seed", "expected"), [(0, 0), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63)]
)
def test_a_seed_is_64_bits(seed: int, expected: int) -> None:
    assert sampled(seed=seed).seed == expected


def test_a_seed_is_drawn_if_none_is_given() -> None:
    assert len({sampled().seed for _ in range(20)}) == 20


def test_ids_are_a_set() -> None:
    got = sampled(stop_token_ids=[5, 3, 5], allowed_token_ids=[9, 1, 9])
    assert (got.stop_token_ids, got.allowed_token_ids) == ((3, 5), (1, 9))
    assert sampled().allowed_token_ids is None


@pytest.mark.parametrize("ids", [[-1], [MODEL.vocab_size], [2**31], [2**63], [0, -5]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    """C22."""
    for field in ("stop_token_ids", "allowed_token_ids"):
        with pytest.raises(ApiError, match=field):
            sampled(**{field: ids})
    with pytest.raises(ApiError, match="prompt"):
        check_prompt(ids, MODEL, "prompt")


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"allowed_token_ids": [256], "min_tokens": 1}, False),
        ({"allowed_token_ids": [65, 256], "stop_token_ids": [65], "min_tokens": 1}, False),
        ({"allowed_token_ids": [65, 256], "min_tokens": 1}, True),
        ({"allowed_token_ids": [256], "min_tokens": 1, "ignore_eos": True}, True),
        ({"allowed_token_ids": [256]}, True),
    ],
)
def test_some_token_is_allowed_before_the_answer_may_end(
    fields: dict[str, Any], fits: bool
) -> None:
    if fits:
        sampled(**fields)
        return
    with pytest.raises(ApiError, match="allowed_token_ids") as refused:
        sampled(**fields)
    assert refused.value.status == 400


def test_the_length_of_a_prompt_is_told_before_its_ids() -> None:
    """R16."""
    model = replace(MODEL, max_model_len=3)
    with pytest.raises(ApiError, match="has 3 tokens"):
        check_prompt([-1, -1, -1], model, "prompt")
    assert check_prompt([1, 2], model, "prompt") == (1, 2)
    with pytest.raises(ApiError, match="empty"):
        check_prompt([], model, "prompt")


def test_bad_words_of_tokens_that_the_model_has_not_cannot_come() -> None:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "x"})
    got = sampling(request, 10, MODEL, LIMITS, ((5, MODEL.vocab_size), (5, 6)))
    assert got.bad_token_ids == ((5, 6),)

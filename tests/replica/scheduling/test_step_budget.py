from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.scheduling.step_budget import CostModel, StepBudget


@given(st.floats(0, 1), st.floats(1e-6, 1e-2), st.integers(0, 100_000), st.floats(0.1, 100))
def test_the_longest_chunk_fits_and_one_more_token_does_not(token_ms, pair_ms, start, ms):
    cost = CostModel(token_ms, pair_ms)
    count = cost.tokens_within(start, ms)
    assert cost.ms(start, count) <= ms * 1.001
    assert cost.ms(start, count + 1) > ms * 0.999


def test_context_makes_a_chunk_dearer():
    """256 tokens behind a long context cost as much as many more at the beginning."""
    cost = CostModel(token_ms=0.01, pair_ms=1e-5)
    early, late = (cost.tokens_within(start, 10) for start in (0, 32_000))
    assert early > 10 * late > 0


def test_without_a_time_limit_tokens_alone_count():
    budget = StepBudget(100, math.inf, CostModel())
    assert budget.take(0, 60) == 60
    assert budget.take(0, 60) == 40
    assert budget.take(0, 60) == 0


def test_a_prompt_whose_context_eats_the_budget_still_goes_on():
    budget = StepBudget(100, 1.0, CostModel(token_ms=5.0))
    assert budget.take(0, 60) == 1
    assert budget.take(0, 60) == 0


def test_tokens_that_are_scored_cost_more():
    budget = StepBudget(100, 10.0, CostModel(token_ms=0.1, score_ms=0.9))
    assert budget.take(0, 60, scored=True) == 10
    assert StepBudget(100, 10.0, budget.cost).take(0, 60) == 60


def test_what_a_part_leaves_comes_back():
    budget = StepBudget(100, 8.0, CostModel(token_ms=0.1))
    part = budget.split_off(0.25)
    assert (part.tokens, part.ms, budget.tokens, budget.ms) == (25, 2.0, 75, 6.0)
    assert part.take(0, 10) == 10
    budget.add(part)
    assert (budget.tokens, budget.ms) == (90, pytest.approx(7.0))

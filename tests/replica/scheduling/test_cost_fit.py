"""The cost model is found again from steps that follow it, and follows steps that do not."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.scheduling.batch import Batch, Scores
from replica.scheduling.cost_fit import FAR, CostFit, predicted_ms, step_work
from replica.scheduling.step_budget import CostModel

H200 = CostModel(fixed_ms=3.0, token_ms=0.019, key_ms=3e-5, pair_ms=2.1e-6, floor_ms=8.5)
"""About an 8B model."""


def chunk(start: int, count: int) -> Batch:
    lengths, starts = np.array([count], np.int32), np.array([start], np.int32)
    return dataclasses.replace(Batch.padding(1), starts=starts, lengths=lengths)


def cost(model: CostModel, batch: Batch) -> float:
    return predicted_ms(model, step_work(batch.starts, batch.lengths))


def calibrated(model: CostModel) -> CostFit:
    sizes = [
        step_work(np.array([depth]), np.array([count]))
        for depth in (0, 16_384, 65_536, 122_880)
        for count in (4, 16, 128, 1024, 4096)
    ]
    return CostFit((work, predicted_ms(model, work)) for work in sizes)


@given(
    st.floats(0, 20),
    st.floats(1e-4, 2),
    st.sampled_from([0, 1e-6, 1e-4, 1e-2]),
    st.sampled_from([1e-8, 2e-6, 1e-4, 1.2e-3, 1e-2]),
)
def test_a_device_that_follows_the_model_is_predicted_at_every_depth(fixed, token, key, pair):
    true = CostModel(fixed, token, key, pair)
    found = calibrated(true).model
    for depth, count in ((0, 8192), (30_000, 7), (120_000, 8192), (100_000, 500)):
        batch = chunk(depth, count)
        assert cost(found, batch) == pytest.approx(cost(true, batch), rel=0.02)
    assert min(found.fixed_ms, found.token_ms, found.key_ms, found.pair_ms) >= 0


def test_a_device_that_slows_down_is_followed():
    fit, rng = calibrated(H200), random.Random(0)
    for _ in range(400):
        batch = chunk(rng.randrange(120_000), rng.randint(1, 8192))
        fit.observe(batch, 1.5 * cost(H200, batch))
    errors = []
    for _ in range(200):
        batch = chunk(rng.randrange(120_000), rng.randint(64, 8192))
        errors.append(abs(cost(fit.model, batch) / cost(H200, batch) / 1.5 - 1))
    assert sorted(errors)[180] < 0.15


def test_traffic_of_one_kind_does_not_unlearn_the_others():
    fit = calibrated(H200)
    for _ in range(2000):
        fit.observe(chunk(0, 512), cost(H200, chunk(0, 512)))
    far = chunk(120_000, 4096)
    assert cost(fit.model, far) == pytest.approx(cost(H200, far), rel=0.02)


def test_launches_that_slow_down_are_followed_and_teach_nothing_about_the_device():
    fit, brief, long = calibrated(H200), chunk(0, 32), chunk(60_000, 4096)
    assert cost(fit.model, brief) == pytest.approx(8.5)
    for _ in range(400):
        fit.observe(brief, 12.0)
    assert cost(fit.model, brief) == pytest.approx(12.0, rel=0.01)
    assert cost(fit.model, long) == pytest.approx(cost(H200, long), rel=0.02)


def test_what_scores_cost_is_learnt_apart():
    """A tenant that asks for log probabilities of prompts holds others up no longer than without,
    and makes no other prompt look dear."""
    fit = calibrated(H200)
    assert fit.model.with_scores.tokens_within(0, 250.0) < 20  # the first ones are few
    plain, scored = chunk(0, 512), chunk(0, 512)
    wanted = Scores(np.arange(128), np.zeros(128, np.int32), ((0, 128),))
    scored = dataclasses.replace(scored, scores=wanted)
    for _ in range(40):
        fit.observe(plain, cost(H200, plain))
        fit.observe(scored, cost(H200, plain) + 128 * 2.5)
    assert fit.model.score_ms == pytest.approx(2.5, rel=0.01)
    assert cost(fit.model, plain) == pytest.approx(cost(H200, plain), rel=0.02)
    assert fit.model.with_scores.tokens_within(0, 250.0) <= 100


def test_one_step_that_was_held_up_changes_little():
    fit, batch = calibrated(H200), chunk(60_000, 2048)
    fit.observe(batch, 5000.0)
    assert cost(fit.model, batch) < FAR / 1.5 * cost(H200, batch)


def test_a_step_without_time_teaches_nothing():
    fit = calibrated(H200)
    before = fit.model
    fit.observe(chunk(0, 512), 0.0)
    assert fit.model == before


def decode(rows: int, context: int) -> Batch:
    starts, lengths = np.full(rows, context, np.int32), np.ones(rows, np.int32)
    return dataclasses.replace(Batch.padding(rows), starts=starts, lengths=lengths)


def test_what_limits_a_step_are_parts_of_its_time():
    fit = calibrated(H200)
    weights, _, keys, _, launches = fit.limits(decode(1, 1024))
    assert weights > 0.9
    assert launches == 0
    weights, tokens, keys, _, launches = fit.limits(decode(64, 4096))
    assert keys > weights > tokens
    assert launches == 0
    assert fit.limits(chunk(0, 8192))[1] > 0.6
    assert fit.limits(chunk(100_000, 8192))[3] > 0.7
    assert fit.limits(chunk(0, 4))[4] > 0.5
    for batch in (decode(1, 1024), decode(64, 4096), chunk(0, 8192), chunk(0, 4)):
        assert fit.limits(batch).sum() == pytest.approx(1)


def test_nothing_limits_what_nothing_is_known_of():
    assert not CostFit().limits(decode(1, 1024)).any()

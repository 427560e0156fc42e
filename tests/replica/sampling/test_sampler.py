"""The sampler on tensors. Whole-engine behaviour of sampling is in test_engine.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from replica.io_slot import FIRST_STOP_ID, NEUTRAL, Sizes, input_layout, packed
from replica.messages import Sampling
from replica.sampling.rng import uniform
from replica.sampling.sampler import Sampler, keep_most_likely
from replica.scheduling.batch import Batch, NewRow

VOCAB = 50


def sample(
    logits: Tensor,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    seed: int | list[int] = 0,
    choice: int = 0,
    position: int | list[int] = 0,
    stop_ids: tuple[int, ...] = (),
    hold_until: int = 0,
    mask: Tensor | None = None,
) -> list[int]:
    """One step over rows with these parameters; scalars hold for all rows."""
    count = len(logits)
    sizes = Sizes(count, count, 1, logits.shape[1])
    _, inputs = packed(input_layout(sizes))
    everything = torch.arange(count)
    inputs["new_rows"][:] = everything
    inputs["sample_rows"][:] = everything
    inputs["sample_positions"][:] = torch.as_tensor(position)
    columns = (top_k, seed, choice, hold_until, 0)
    for column, value in enumerate(columns):
        inputs["row_ints"][:, column] = torch.as_tensor(value)
    inputs["row_ints"][:, FIRST_STOP_ID:] = -1
    inputs["row_ints"][:, FIRST_STOP_ID : FIRST_STOP_ID + len(stop_ids)] = torch.tensor(
        stop_ids, dtype=torch.int64
    )
    inputs["row_floats"][:] = torch.tensor(NEUTRAL)
    for column, number in enumerate((temperature, top_p, min_p)):
        inputs["row_floats"][:, column] = torch.as_tensor(number)
    none = np.zeros(0, np.int32)
    new_rows = tuple(
        NewRow(row, Sampling(max_tokens=1), stop_ids, hold_until, none, none)
        for row in range(count)
    )
    filtered = (
        (torch.as_tensor(top_k) > 0) | (torch.as_tensor(top_p) < 1) | (torch.as_tensor(min_p) > 0)
    )
    batch = replace(
        Batch.padding(count),
        new_rows=new_rows,
        greedy=bool((inputs["row_floats"][:, 0] == 0).all()),
        filtered=bool(filtered.any()),
        held=hold_until > 0,
        constrained=mask is not None,
    )
    sampler = Sampler(count, logits.shape[1])
    sampler.admit_rows(batch, inputs)
    before = logits.clone()
    ids = sampler.sample(batch, inputs, logits, mask)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), (
        "log probabilities are read from them afterwards"
    )
    assert torch.equal(sampler.last_token[:count], ids)
    chosen: list[int] = ids.tolist()
    return chosen


def chi_square(draws: list[int], expected: Tensor) -> float:
    """Statistic over the tokens with enough expected draws, the rest pooled."""
    counts = torch.bincount(torch.tensor(draws), minlength=len(expected)).double()
    expected = expected.double() * len(draws)
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None].clamp(min=1e-9)])
    return float(((observed - wanted) ** 2 / wanted)[wanted > 1e-6].sum())


LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(7)) * 2
DRAWS = 20_000


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, VOCAB),
        ({"top_k": -1}, VOCAB),
        ({"top_k": VOCAB + 7}, VOCAB),
        ({"top_k": 5}, 5),
        ({"top_p": 0.7}, None),
        ({"top_k": 20, "top_p": 0.8}, None),
        ({"min_p": 0.05}, None),
        ({"min_p": 0.02, "top_k": 20, "top_p": 0.95, "temperature": 1.3}, None),
        ({"temperature": 0.6}, VOCAB),
    ],
)
def test_draws_follow_the_exact_distribution(options, kept):
    """R04, X6: chi-square; rows without top-k beside rows with it."""
    probabilities = (LOGITS / options.get("temperature", 1.0)).softmax(-1).double()
    order = probabilities.argsort(descending=True)
    top_k = options.get("top_k", 0)
    expected = torch.zeros(VOCAB).double()
    candidates = order[: top_k if 0 < top_k < VOCAB else VOCAB]
    masses = probabilities[candidates] / probabilities[candidates].sum()
    inside = int((masses.cumsum(0) < options.get("top_p", 1.0)).sum()) + 1
    expected[candidates[:inside]] = masses[:inside] / masses[:inside].sum()
    expected[probabilities < options.get("min_p", 0) * probabilities.max()] = 0
    expected /= expected.sum()
    if kept is not None:
        assert int((expected > 0).sum()) == kept
    draws = sample(LOGITS.expand(DRAWS, -1), seed=list(range(DRAWS)), **options)
    assert not set(draws) - set(expected.nonzero().flatten().tolist())
    assert chi_square(draws, expected) < 95  # p < 1e-4 at 49 degrees of freedom


def test_rows_with_and_without_top_k_share_a_batch():
    """R04: each row draws from its own set, whatever its neighbours' are."""
    sets = [1, 0, -1, VOCAB + 7, 5]
    count = 5_000 * len(sets)
    draws = sample(LOGITS.expand(count, -1), top_k=sets * 5_000, seed=list(range(count)))
    probabilities = LOGITS.softmax(-1)
    assert set(draws[::5]) == {int(LOGITS.argmax())}
    for place in (1, 2, 3):
        assert chi_square(draws[place::5], probabilities) < 95
    best = probabilities.topk(5)
    five = torch.zeros(VOCAB).index_put((best.indices,), best.values / best.values.sum())
    assert set(draws[4::5]) == set(best.indices.tolist())
    assert chi_square(draws[4::5], five) < 30


def test_greedy_and_top_k_1_take_the_most_likely():
    best = int(LOGITS.argmax())
    assert sample(LOGITS[None], temperature=0.0) == [best]
    assert set(sample(LOGITS.expand(200, -1), top_k=1, seed=list(range(200)))) == {best}
    assert set(sample(LOGITS.expand(200, -1), top_p=1e-9, seed=list(range(200)))) == {best}
    assert set(sample(LOGITS.expand(200, -1), min_p=1.0, seed=list(range(200)))) == {best}


def test_a_greedy_row_with_banned_tokens_beside_a_sampled_one_makes_no_nan():
    """C11: -inf over temperature -1 would be a row of NaN."""
    logits = torch.tensor([[1.0, -torch.inf, 2.0], [1.0, -torch.inf, 2.0]])
    for seed in range(50):
        ids = sample(logits, temperature=[0.0, 1.0], seed=[0, seed])
        assert ids[0] == 2
        assert ids[1] in (0, 2)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_row_of_no_numbers_yields_an_id_and_harms_no_neighbour(value):
    """An id beyond the vocabulary would be the end of everybody's step."""
    logits = torch.stack([torch.full_like(LOGITS, value), LOGITS, torch.full_like(LOGITS, value)])
    settings = {"temperature": [1.0, 1.0, 0.0], "seed": [1, 2, 3]}
    for options in ({}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}):
        first, neighbour, last = sample(logits, **settings, **options)
        assert {first, last} <= set(range(VOCAB))
        assert [neighbour] == sample(LOGITS[None], seed=[2], **options)


def test_tiny_temperatures_and_huge_logits_stay_finite():
    logits = torch.tensor([[1e30, 3e30, -1e30], [-torch.inf, 5.0, 4.0]])
    assert sample(logits, temperature=[1e-6, 1e-30]) == [1, 1]


def test_a_draw_depends_on_seed_choice_and_position_alone():
    """C08 at the sampler: row, batch size and neighbours do not matter."""
    alone = sample(LOGITS[None], seed=42, position=9)
    crowd = sample(
        torch.stack([LOGITS, LOGITS * 0.1, LOGITS]),
        seed=[1, 2, 42],
        position=[3, 4, 9],
        temperature=[0.0, 2.0, 1.0],
        top_k=[0, 3, 0],
    )
    assert crowd[2] == alone[0]
    by_position = sample(LOGITS.expand(64, -1), seed=42, position=list(range(64)))
    by_choice = [sample(LOGITS[None], seed=42, choice=c)[0] for c in range(64)]
    assert len(set(by_position)) > 5
    assert len(set(by_choice)) > 5


def test_uniform_numbers_are_uniform_and_independent_of_their_neighbours():
    position = torch.arange(100_000)
    numbers = uniform(torch.tensor(3), torch.tensor(0), position)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    counts = torch.histc(numbers, 100, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 160
    pairs = torch.stack([numbers[:-1], numbers[1:]])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.01
    seeds = uniform(position - 50_000, torch.tensor(0), torch.tensor(1))
    assert float(((torch.histc(seeds, 100, 0, 1) - 1000) ** 2 / 1000).sum()) < 160


def test_stop_ids_are_held_back_before_their_position_only():
    logits = LOGITS.clone()
    logits[[7, 8]] = torch.tensor([50.0, 49.0])
    held = sample(logits[None], temperature=0.0, stop_ids=(7, 8), hold_until=5, position=4)
    free = sample(logits[None], temperature=0.0, stop_ids=(7, 8), hold_until=5, position=5)
    assert held[0] not in (7, 8)
    assert free == [7]


def test_a_mask_leaves_only_what_it_allows():
    flags = np.zeros((2, VOCAB), bool)
    flags[0, [3, 49]] = True
    flags[1] = True
    mask = torch.from_numpy(np.packbits(flags, axis=1, bitorder="little"))
    ids = sample(LOGITS.expand(2, -1), temperature=0.0, mask=mask)
    assert ids == [3 if LOGITS[3] > LOGITS[49] else 49, int(LOGITS.argmax())]


def test_filters_keep_ties_and_never_everything_or_nothing():
    probabilities = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    kept = keep_most_likely(
        probabilities, torch.tensor([2, 2]), torch.tensor([0.0, 0.9]), torch.tensor([0.25, 0.0])
    )
    assert kept.tolist() == [[0.25] * 4, [1.0, 0.0, 0.0, 0.0]]

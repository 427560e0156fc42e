"""Draws on a GPU are those of the CPU, for the same probabilities."""

from __future__ import annotations

import pytest
import torch

from replica.sampler import _invert, keep_most_likely


def check(device: str, rows: int, vocab_size: int, sharpness: float) -> None:
    from replica.triton_draw import draw

    generator = torch.Generator().manual_seed(rows + vocab_size)
    logits = torch.randn(rows, vocab_size, generator=generator) * sharpness
    logits[:, ::7] = -torch.inf  # banned tokens
    probabilities = logits.softmax(-1)
    top_k = torch.tensor([0, 1, 5, 50, vocab_size + 3, -1])[torch.arange(rows) % 6]
    top_p = torch.tensor([1.0, 0.9, 0.3, 1e-9, 0.9999])[torch.arange(rows) % 5]
    min_p = torch.tensor([0.0, 0.02, 0.5, 1.0])[torch.arange(rows) % 4]
    least = min_p * probabilities.amax(-1)
    numbers = torch.rand(rows, dtype=torch.float64, generator=generator)
    numbers[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    inputs = [x.to(device) for x in (probabilities, top_k, top_p, least, numbers)]
    for filtered in (True, False):
        kept = probabilities
        if filtered:
            kept = keep_most_likely(probabilities, top_k, top_p, least)
        expected = _invert(kept, numbers)
        got = draw(*inputs, filtered=filtered).cpu()
        assert torch.equal(got, expected)
        assert bool((kept.gather(1, got[:, None]) > 0).all()), "a token that was filtered out"


@pytest.mark.parametrize("vocab_size", [50, 2048, 32_000, 128_256])
@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_draws_equal_those_of_the_cpu(vocab_size, sharpness):
    """X6, R04: top-k, top-p, min-p, all and none of them, beside each other."""
    check("cuda", 60, vocab_size, sharpness)

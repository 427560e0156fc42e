"""Sampling on a GPU does what the CPU's reference does, for the same logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replica.io_slot import (
    FIRST_STOP_ID,
    HOLD_UNTIL,
    MIN_P,
    NEUTRAL,
    NUM_BIASES,
    PRESENCE,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from replica.messages import MAX_BIASES
from replica.sampling.backends import make_sampler
from replica.sampling.logprobs import write_logprobs
from replica.sampling.sampler import Sampler
from replica.sampling.shaping import IN_PROMPT
from replica.scheduling.batch import Batch

ROWS = 60


def cycle(values: list[float], count: int, every: int = 1) -> torch.Tensor:
    return torch.tensor(values)[torch.arange(count) // every % len(values)]


class Case:
    """Rows of all kinds beside each other, each its own row of the sampler's state."""

    def __init__(self, vocab_size: int, sharpness: float, count: int = ROWS) -> None:
        draw = self.draw = torch.Generator().manual_seed(vocab_size)
        self.count, self.vocab_size = count, vocab_size
        self.logits = torch.randn(count, vocab_size, generator=draw) * sharpness
        self.logits[:, ::7] = -torch.inf  # banned tokens
        self.owners = torch.randperm(count, generator=draw)
        self.positions = torch.randint(0, 40, (count,), generator=draw)
        self.state = Sampler(count, vocab_size, torch.device("cpu"))
        ints, floats = self.state.ints, self.state.floats
        ints[:, FIRST_STOP_ID:] = -1
        ints[:count, TOP_K] = cycle([0, 1, 5, 50, vocab_size + 3, -1, 200], count).long()
        ints[:, SEED] = torch.randint(-(2**62), 2**62, (count + 1,), generator=draw)
        floats[:] = torch.tensor(NEUTRAL)
        floats[:count, TEMPERATURE] = cycle([1.0, 0.7, 0.0, 2.0, 1e-9], count, 3)
        floats[:count, TOP_P] = cycle([1.0, 0.9, 0.3, 1e-9, 0.9999], count)
        floats[:count, MIN_P] = cycle([0.0, 0.0, 0.05, 0.5], count)

    def shape(self) -> None:
        """Give half of the rows penalties, and all of them biases and stop tokens."""
        count, vocab_size, draw, shaping = (
            self.count, self.vocab_size, self.draw, self.state.shaping,
        )  # fmt: skip
        rows = slice(0, count, 2)
        penalties = torch.rand(count, 3, generator=draw) * torch.tensor([2.0, 1.0, 0.5])
        penalties[:, 2] += 1
        self.state.floats[rows, PRESENCE:] = penalties[rows]
        shaping.counts[:] = torch.randint(
            0, 3, shaping.counts.shape, generator=draw, dtype=torch.int32
        )
        shaping.counts[:, ::3] |= IN_PROMPT
        ids = torch.rand(count + 1, max(vocab_size, MAX_BIASES), generator=draw).argsort(-1)
        shaping.bias_ids[:] = ids[:, :MAX_BIASES] % vocab_size
        shaping.biases[:] = torch.randn(count + 1, MAX_BIASES, generator=draw) * 20
        most = min(MAX_BIASES, vocab_size)
        ints = self.state.ints
        ints[:count, NUM_BIASES] = cycle([0, 1, 7, most], count).long()
        ints[:, HOLD_UNTIL] = torch.randint(0, 40, (count + 1,), generator=draw)
        ints[:, FIRST_STOP_ID : FIRST_STOP_ID + 3] = torch.randint(
            1, vocab_size, (count + 1, 3), generator=draw
        )

    def run(self, device: str, batch: Batch, mask: torch.Tensor | None = None) -> Sampler:
        sampler = make_sampler(self.count, self.vocab_size, torch.device(device))
        for name in ("ints", "floats"):
            getattr(sampler, name).copy_(getattr(self.state, name))
        for name in ("counts", "bias_ids", "biases"):
            getattr(sampler.shaping, name).copy_(getattr(self.state.shaping, name))
        inputs = {
            "sample_rows": self.owners.to(device),
            "sample_positions": self.positions.to(device),
        }
        logits = self.logits.to(device)
        before = logits.clone()
        bits = None if mask is None else mask.to(device)
        with torch.inference_mode():
            ids = sampler.sample(batch, inputs, logits, bits)
        assert torch.equal(logits, before), "log probabilities are read from them afterwards"
        assert torch.equal(sampler.last_token[inputs["sample_rows"]], ids)
        return sampler


def same(case: Case, batch: Batch, mask: torch.Tensor | None = None) -> None:
    expected, got = case.run("cpu", batch, mask), case.run("cuda", batch, mask)
    assert torch.equal(got.last_token.cpu(), expected.last_token)
    assert torch.equal(got.shaping.counts.cpu(), expected.shaping.counts)


@pytest.mark.parametrize("vocab_size", [50, 2048, 32_000, 128_256])
@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_draws_equal_those_of_the_cpu(vocab_size, sharpness):
    """X6, R04: greedy, top-k, top-p, min-p, all, and none, beside each other."""
    same(Case(vocab_size, sharpness), Batch.padding(ROWS))


@pytest.mark.parametrize("vocab_size", [50, 4096, 49_152])
def test_penalties_biases_and_held_stops_equal_those_of_the_cpu(vocab_size):
    case = Case(vocab_size, 3.0)
    case.shape()
    same(case, Batch.padding(ROWS, shaped=True))


@pytest.mark.parametrize("shaped", [False, True])
def test_masks_equal_those_of_the_cpu(shaped):
    case = Case(3001, 3.0)
    if shaped:
        case.shape()
    bits = torch.randint(1, 256, (ROWS, -(-3001 // 8)), dtype=torch.uint8, generator=case.draw)
    batch = replace(Batch.padding(ROWS, shaped=shaped), constrained=True)
    same(case, batch, bits)


@pytest.mark.parametrize("steps", [1, 0.5, 100])
def test_equal_logits_are_kept_together(steps):
    """Ties at a border stay, however many there are."""
    case = Case(5000, 2.0)
    case.logits = (case.logits * steps).round() / steps
    same(case, Batch.padding(ROWS))


@pytest.mark.parametrize("vocab_size", [20, 64, 4097, 128_256])
@pytest.mark.parametrize("ties", ["none", "some", "all"])
def test_log_probabilities(vocab_size, ties):
    count = 9
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    logits = {"none": logits, "some": logits.round() + 0.0, "all": torch.ones_like(logits)}[ties]
    if vocab_size > 20:
        logits[:, 3::5] = -torch.inf
    tokens = torch.arange(count) % vocab_size
    chosen = torch.empty(count + 1, device="cuda")
    ids = torch.full((count + 1, 20), -1, dtype=torch.int32, device="cuda")
    top = torch.empty(count + 1, 20, device="cuda")
    write_logprobs(logits.cuda(), tokens.cuda(), chosen, ids, top)
    exact = logits.double().log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True)[1][:, :20]
    assert torch.equal(ids[:count].cpu().long(), order)
    assert bool((ids[count:] == -1).all()), "wrote beyond its rows"
    torch.testing.assert_close(
        top[:count].cpu().double(), exact.gather(1, order), atol=1e-4, rtol=0
    )
    expected = exact.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(chosen[:count].cpu().double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("vocab_size", [64, 5000, 128_256])
def test_logits_that_are_no_numbers_name_no_token_beyond_the_vocabulary(vocab_size):
    """A model may overflow, and padding rows hold anything. Else the next step would read there."""
    logits = torch.randn(8, vocab_size, device="cuda")
    logits[1] = torch.nan
    logits[2] = torch.inf
    logits[3] = -torch.inf
    logits[4, : vocab_size // 2] = torch.nan
    logits[5, 7] = torch.inf
    logits[6, ::2] = -torch.inf
    rows = torch.arange(8, device="cuda")
    chosen, top = torch.empty(8, device="cuda"), torch.empty(8, 20, device="cuda")
    ids = torch.empty(8, 20, dtype=torch.int32, device="cuda")
    write_logprobs(logits, rows, chosen, ids, top)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < vocab_size
    sampler = make_sampler(8, vocab_size, torch.device("cuda"))
    inputs = {"sample_rows": rows, "sample_positions": rows}
    for temperature, top_k, top_p in ((0, 0, 1), (1, 0, 1), (1, 5, 1), (1, 5, 0.9), (1, 0, 0.9)):
        sampler.floats[:, TEMPERATURE], sampler.floats[:, TOP_P] = temperature, top_p
        sampler.ints[:, TOP_K] = top_k
        sampled = sampler.sample(Batch.padding(8), inputs, logits, None)
        assert int(sampled.min()) >= 0
        assert int(sampled.max()) < vocab_size

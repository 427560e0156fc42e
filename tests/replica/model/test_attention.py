from __future__ import annotations

import random
from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from replica.model.attention.backends import paged_attention
from replica.model.attention.cpu import MAX_PADDING, similar_lengths
from replica.model.attention.metadata import AttentionMetadata
from replica.model.rotary import Rotation
from tests.replica.paged import attention_spec

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 16, 2


class Pool:
    """A KV pool whose rows own random blocks, with random keys and values before this step.

    Every slot that holds no token of a row is NaN.
    """

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        library: CDLL | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """rows: (tokens in this step, tokens before it). The first layer has the window and the
        soft cap, the second has neither."""
        plain, *_ = attention_spec(HEADS, KV_HEADS, DIM, LAYERS).layers
        self._layer = replace(plain, window=window, soft_cap=soft_cap)
        spec = replace(attention_spec(HEADS, KV_HEADS, DIM, LAYERS), layers=(self._layer, plain))
        self.query_lens = [new for new, _ in rows]
        self.context_lens = [new + old for new, old in rows]
        widths = [-(-length // block_size) for length in self.context_lens]
        num_blocks = sum(widths) + 3
        self.cache, self._attention = paged_attention(
            spec, num_blocks, block_size, dtype, torch.device("cpu"), library
        )
        self.cache.layers.fill_(torch.nan)
        self._size = block_size
        blocks = list(range(num_blocks))
        random.Random(seed).shuffle(blocks)
        self._blocks = [
            blocks[end - width : end] for width, end in zip(widths, accumulate(widths), strict=True)
        ]
        self._generator = torch.Generator().manual_seed(seed)
        for row, (_, old) in enumerate(rows):
            slots = self.slots(row)[:old]
            self.cache.layers[:, slots] = self.random(LAYERS, old, 2, KV_HEADS, DIM)

    def random(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self._generator)
        return values.to(self.cache.layers.dtype)

    def slots(self, row: int) -> Tensor:
        """Slots of all positions of a row."""
        positions = torch.arange(self.context_lens[row])
        blocks = torch.tensor(self._blocks[row])
        return blocks[positions // self._size] * self._size + positions % self._size

    def metadata(self) -> AttentionMetadata:
        width = max(map(len, self._blocks)) + 2
        guard = self.cache.num_blocks
        new_slots = [self.slots(row)[-count:] for row, count in enumerate(self.query_lens)]
        return AttentionMetadata(
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            block_tables=torch.tensor(
                [row + [guard] * (width - len(row)) for row in self._blocks], dtype=torch.int32
            ),
            slot_mapping=torch.cat(new_slots),
        )

    def step(self, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Attend with random queries, keys and values: (q, kv, result)."""
        count = sum(self.query_lens)
        q, kv = self.random(count, HEADS, DIM), self.random(count, 2, KV_HEADS, DIM)
        attend = self._attention.bind(self.metadata())
        product = torch.cat((q.flatten(1), kv.flatten(1)), 1)
        not_turned = Rotation(q.new_ones(count, 1, DIM), q.new_zeros(count, 1, DIM))
        return q, kv, attend(layer, product, not_turned, None)

    def expected(self, q: Tensor, layer: int = 0) -> Tensor:
        """Softmax attention in float64, token by token, over what the pool holds now."""
        ends = list(accumulate(self.query_lens, initial=0))
        outputs = []
        for row, (first, last) in enumerate(pairwise(ends)):
            keys, values = self.cache.layers[layer, self.slots(row)].double().unbind(1)
            for index in range(first, last):
                end = self.context_lens[row] - (last - 1 - index)
                begin = max(0, end - (self._layer.window or end)) if layer == 0 else 0
                cap = self._layer.soft_cap if layer == 0 else None
                seen = slice(begin, end)
                outputs.append(attention(q[index].double(), keys[seen], values[seen], cap))
        return torch.stack(outputs)


def attention(q: Tensor, keys: Tensor, values: Tensor, cap: float | None) -> Tensor:
    """[HEADS, DIM] over [L, KV_HEADS, DIM] -> [HEADS * DIM]"""
    heads = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = keys[:, shared] @ q[head] / DIM**0.5
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        heads.append(scores.softmax(0) @ values[:, shared])
    return torch.cat(heads)


@pytest.fixture(scope="module", params=["torch", "native"])
def library(request: pytest.FixtureRequest) -> CDLL | None:
    return request.getfixturevalue("kernels") if request.param == "native" else None


def check(pool: Pool, *, tolerance: float = 1e-5) -> None:
    for layer in range(LAYERS):
        q, _, result = pool.step(layer)
        expected = pool.expected(q, layer)
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(1, 0)], id="first token"),
        pytest.param([(1, 7), (1, 8), (1, 9)], id="decode around a block border"),
        pytest.param([(1, 20)] * 4, id="decode with equal contexts"),
        pytest.param([(1, 900), (1, 3), (1, 880), (1, 5)], id="decode, long and short contexts"),
        pytest.param([(9, 0)], id="whole prompt"),
        pytest.param([(5, 6)], id="later chunk"),
        pytest.param([(1, 5), (7, 0), (1, 30), (3, 8), (1, 0)], id="mixed"),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention_is_exact(
    rows: list[tuple[int, int]], dtype: torch.dtype, tolerance: float, library: CDLL | None
) -> None:
    check(Pool(rows, dtype=dtype, library=library), tolerance=tolerance)


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 5, 16]), st.integers(0, 70)),
        min_size=1,
        max_size=8,
    ),
    block_size=st.sampled_from([1, 3, 4, 16]),
    seed=st.integers(0, 1000),
    window=st.sampled_from([None, None, 1, 2, 7, 16, 40]),
    soft_cap=st.sampled_from([None, None, 0.5, 30.0]),
)
def test_any_step_is_exact_whatever_other_slots_hold(
    rows: list[tuple[int, int]],
    block_size: int,
    seed: int,
    window: int | None,
    soft_cap: float | None,
    library: CDLL | None,
) -> None:
    """Guard block, free blocks and the tails of blocks in use are NaN here (C04, R31)."""
    options = {"window": window, "soft_cap": soft_cap}
    check(Pool(rows, block_size=block_size, seed=seed, library=library, **options))


def test_what_a_window_has_left_behind_reaches_nobody(library: CDLL | None) -> None:
    pool = Pool([(1, 30), (5, 60), (1, 3)], library=library, window=8)
    pool.cache.layers[0, pool.slots(0)[:22]] = torch.nan
    pool.cache.layers[0, pool.slots(1)[:52]] = torch.nan
    q, _, result = pool.step()
    torch.testing.assert_close(result.double(), pool.expected(q), rtol=1e-5, atol=1e-5)


def test_a_chunk_as_long_as_torch_likes_best_has_its_window_too(kernels: CDLL) -> None:
    for window in (100, 500):
        check(Pool([(700, 0), (1, 5), (300, 40)], library=kernels, window=window, soft_cap=5.0))


def test_keys_and_values_go_to_the_slots_of_their_tokens_and_nowhere_else(
    library: CDLL | None,
) -> None:
    pool = Pool([(1, 6), (3, 2)], library=library)
    before = pool.cache.layers.clone()
    _, kv, _ = pool.step(layer=1)
    slots = pool.metadata().slot_mapping
    torch.testing.assert_close(pool.cache.layers[1, slots], kv, rtol=0, atol=0)
    pool.cache.layers[1, slots] = before[1, slots]
    torch.testing.assert_close(pool.cache.layers, before, rtol=0, atol=0, equal_nan=True)


def test_a_row_with_broken_values_breaks_no_other_row(library: CDLL | None) -> None:
    pool = Pool([(1, 9), (1, 20), (4, 3)], library=library)
    pool.cache.layers[:, pool.slots(1)] = torch.nan
    q, _, result = pool.step()
    others = torch.tensor([0, 2, 3, 4, 5])
    torch.testing.assert_close(
        result[others].double(), pool.expected(q)[others], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("rows", [[(1, 9), (1, 3)], [(4, 5), (3, 0)]], ids=["decode", "chunks"])
@pytest.mark.parametrize("name", ["block_tables", "slot_mapping"])
@pytest.mark.parametrize("wrong", [-1, -0x7E7E7E7F, 1 << 30])
def test_what_the_pool_does_not_have_is_an_error_and_no_other_memory(
    library: CDLL | None,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[tuple[int, int]],
    name: str,
    wrong: int,
) -> None:
    pool = Pool(rows, library=library)
    metadata = pool.metadata()
    getattr(metadata, name)[0] = wrong
    monkeypatch.setattr(pool, "metadata", lambda: metadata)
    with pytest.raises((IndexError, RuntimeError), match=r"slot|index"):
        pool.step()


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_groups_hold_every_row_once_with_little_padding(lengths: list[int]) -> None:
    groups = list(similar_lengths(range(len(lengths)), lengths))
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        contexts = [lengths[row] for row in group]
        assert max(contexts) * len(contexts) - sum(contexts) <= MAX_PADDING


def test_rows_of_similar_length_are_one_group() -> None:
    assert list(similar_lengths(range(8), [100 - row for row in range(8)])) == [list(range(8))]

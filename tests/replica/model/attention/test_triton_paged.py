"""The GPU's paged attention against float64, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from replica.model.attention.metadata import AttentionMetadata
from replica.model.kv_cache import BlockedKVCache
from replica.model.rotary import Rotation
from tests.replica.paged import attention_spec

LAYERS = 2
STEPS = [
    pytest.param([(1, 0)], id="first token"),
    pytest.param([(1, 7), (1, 63), (1, 64), (1, 65)], id="decode around borders"),
    pytest.param([(1, 900), (1, 3), (1, 1880), (1, 0)], id="decode, long and short contexts"),
    pytest.param([(1, i) for i in range(70)], id="many rows"),
    pytest.param([(200, 0)], id="whole prompt"),
    pytest.param([(70, 133)], id="later chunk"),
    pytest.param([(1, 5), (1, 300), (97, 0), (3, 81), (1, 40), (130, 200)], id="mixed"),
    pytest.param([(2, 3000)], id="two tokens behind a long context"),
    pytest.param([(1, 40), (1, 1500), (33, 2111), (2, 0), (300, 1024)], id="mixed and split"),
]


class Pool:
    """A KV pool whose rows own random blocks; every slot without a token is NaN."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        device: str = "cuda",
        heads: int = 8,
        kv_heads: int = 2,
        dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        """rows: (tokens in this step, tokens before it)."""
        self.heads, self.kv_heads, self.dim, self.device = heads, kv_heads, dim, device
        self.dtype = dtype
        self.query_lens = [new for new, _ in rows]
        self.context_lens = [new + old for new, old in rows]
        widths = [-(-length // block_size) for length in self.context_lens]
        num_blocks = sum(widths) + 3
        spec = attention_spec(heads, kv_heads, dim, LAYERS)
        self.cache = BlockedKVCache(spec, num_blocks, block_size, dtype, torch.device(device))
        self.cache.layers.fill_(torch.nan)
        blocks = list(range(num_blocks))
        random.Random(seed).shuffle(blocks)
        self.blocks = [
            blocks[end - width : end] for width, end in zip(widths, accumulate(widths), strict=True)
        ]
        self._generator = torch.Generator().manual_seed(seed)
        for row, (_, old) in enumerate(rows):
            block, offset = self.places(row)
            stored = self.random(old, LAYERS, 2, kv_heads, dim)
            self.cache.layers[:, :, block[:old], :, offset[:old]] = stored

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype).to(self.device)

    def places(self, row: int) -> tuple[Tensor, Tensor]:
        """Block and offset of every position of a row."""
        position = torch.arange(self.context_lens[row])
        size = self.cache.block_size
        return torch.tensor(self.blocks[row])[position // size], position % size

    def metadata(self) -> AttentionMetadata:
        width = max(map(len, self.blocks)) + 2
        guard, size = self.cache.num_blocks, self.cache.block_size
        slots = []
        for row, count in enumerate(self.query_lens):
            block, offset = self.places(row)
            slots.append((block * size + offset)[-count:])
        tables = [row + [guard] * (width - len(row)) for row in self.blocks]
        starts = list(accumulate(self.query_lens, initial=0))
        ints = {"dtype": torch.int32, "device": self.device}
        return AttentionMetadata(
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            block_tables=torch.tensor(tables, **ints),
            slot_mapping=torch.cat(slots).to(self.device),
            query_starts=torch.tensor(starts, **ints),
            device_context_lens=torch.tensor(self.context_lens, **ints),
        )

    def step(self, layer: int = 1, **options: float) -> tuple[Tensor, Tensor]:
        """Attend with random queries, keys and values: (q, result)."""
        from replica.model.attention.triton_paged import TritonAttention

        spec = attention_spec(self.heads, self.kv_heads, self.dim, LAYERS, **options)
        count = sum(self.query_lens)
        heads = self.random(count, self.heads + 2 * self.kv_heads, self.dim)
        straight = torch.ones(count, self.dim // 2, device=self.device)
        attend = TritonAttention(self.cache, spec).bind(self.metadata())
        rotation = Rotation(straight, torch.zeros_like(straight))
        result = attend(layer, heads.flatten(1)[None], rotation, None)
        return heads[:, : self.heads], result

    def expected(
        self, q: Tensor, layer: int = 1, window: int | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """Softmax attention in float64 over what the pool holds now, [T, heads * dim]."""
        ends = list(accumulate(self.query_lens, initial=0))
        outputs = []
        for row, (first, last) in enumerate(pairwise(ends)):
            block, offset = self.places(row)
            keys, values = self.cache.layers[layer][:, block, :, offset].double().unbind(1)
            keys, values = (
                x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (keys, values)
            )
            scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), keys) / self.dim**0.5
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            position = torch.arange(self.context_lens[row], device=self.device)
            query = position[-(last - first) :, None]
            hidden = position > query
            if window:
                hidden |= position <= query - window
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
        return torch.cat(outputs)


def check(pool: Pool, *, tolerance: float = 1e-5, **options: float) -> None:
    q, result = pool.step(**options)
    expected = pool.expected(q, **options)
    error = (result.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"]
)
def test_attention_is_exact(rows, dim, dtype, tolerance):
    check(Pool(rows, dim=dim, dtype=dtype), tolerance=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (14, 2), (32, 8), (9, 3), (16, 1)], ids=str)
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_any_sharing_of_heads_and_any_block_size(heads, block_size):
    rows = [(1, 5), (1, 300), (97, 0), (3, 81)]
    check(Pool(rows, heads=heads[0], kv_heads=heads[1], block_size=block_size))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"window": 50}, {"soft_cap": 3.0}, {"window": 1}], ids=str)
@pytest.mark.parametrize("rows", STEPS)
def test_windows_and_soft_caps(rows, options):
    check(Pool(rows), **options)


@pytest.mark.gpu
def test_a_context_is_split_where_tiles_of_queries_are_too_few_to_fill_a_gpu():
    from replica.model.attention.triton_paged import CHUNK_PROGRAMS, MAX_SPLITS, launches

    def splits(query_lens: list[int], context_lens: list[int]) -> list[int]:
        return [launch.splits for launch in launches(query_lens, context_lens, 8, 4, 256)]

    assert splits([2], [100_000]) == [MAX_SPLITS]
    assert splits([512], [100_000]) == [CHUNK_PROGRAMS // 8 // 16]
    assert splits([8192], [100_000]) == [1]
    assert splits([544], [100_000]) == [8]
    assert splits([2], [1000]) == [1]
    assert splits([1, 1, 2], [100_000, 9, 1025]) == [32, 2]


@pytest.mark.gpu
def test_padding_rows_are_finite_and_change_no_real_row():
    """R31: pads live in the guard block, whatever it held before."""
    pool = Pool([(1, 40), (1, 90), (1, 0), (1, 0)])
    pool.blocks[2:] = [[pool.cache.num_blocks]] * 2
    q, result = pool.step()
    assert bool(result.isfinite().all())
    expected = pool.expected(q)[:2]
    assert (result[:2].double() - expected).norm() / expected.norm() < 1e-5

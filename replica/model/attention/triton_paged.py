"""Paged attention on a GPU, in Triton: one kernel for decode rows, prompt chunks and both.

A program takes a tile of queries that share a KV head and walks over the blocks of their row with
an online softmax (Dao et al., arXiv:2205.14135). A decode row is a tile of one token. Where tiles
are too few to fill the GPU, the context is split over several programs, whose parts a second
kernel merges (flash decoding): for decode rows, and for a few tokens behind a long context.

Every number that a kernel is launched with for decode rows is fixed by the *shape* of a step, see
`Launch`, or constant. Their contexts live on the device only, so a captured step holds for any of
them. Prompt chunks are never captured: how they are split depends on their contexts, too.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from replica.model.attention.metadata import Attend, AttentionMetadata
from replica.model.gpu.dependent_launch import launches_early, start, wait
from replica.model.gpu.elementwise import rotate_and_store
from replica.model.gpu.padding import empty_rows
from replica.model.kv_cache import BlockedKVCache
from replica.model.rotary import QKNorm, Rotation
from replica.model.spec import LayerSpec, ModelSpec

Parts: TypeAlias = tuple[Tensor, Tensor, Tensor]
LOG2_E = 1.4426950408889634
MAX_SPLITS = 32
PROGRAMS = 512
"""Programs of a decode step that are enough to keep the memory of a large GPU busy."""
CHUNK_PROGRAMS = 2048
"""Most programs that a prompt chunk is split into. Each takes a multiprocessor: half as many are
enough rounds over a large GPU that the last one, which leaves some idle, hardly counts."""
SPLIT_KEYS = 512
"""Fewest keys in each part of a prompt chunk that is split."""


@triton.jit(do_not_specialize=["first_row"])  # else a new value might compile under traffic
def _attend(
    q, token_stride, pool, value_offset, tables, table_stride, starts, contexts, first_row, scale,
    out, part_out, part_max, part_sum,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head and split, tile of the row's queries)."""
    start(DEPENDENT)
    index = tl.program_id(0)
    kv_head, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    row = first_row + index
    row_start = tl.load(starts + row)
    query_len = tl.load(starts + row + 1) - row_start
    context = tl.load(contexts + row)
    wait(DEPENDENT)
    # Query i of the tile: token i // GROUP of the tile, head i % GROUP of those that share K, V.
    TOKENS: tl.constexpr = QUERIES // GROUP
    first_token = tl.program_id(2) * TOKENS
    if first_token >= query_len:
        return
    i = tl.arange(0, QUERIES)
    token = first_token + i // GROUP
    is_query = (i < TOKENS * GROUP) & (token < query_len)
    head = kv_head * GROUP + i % GROUP
    position = context - query_len + token
    d = tl.arange(0, HEAD_WIDTH)
    in_head = d < HEAD_DIM
    q_mask = is_query[:, None] & in_head[None, :]
    place = (row_start + token).to(tl.int64)
    queries = tl.load(
        q + place[:, None] * token_stride + head[:, None] * HEAD_DIM + d[None, :], q_mask, 0.0
    )

    end = tl.minimum(context, context - query_len + first_token + TOKENS)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, context - query_len + first_token - WINDOW + 1) // KEYS * KEYS
    per_split = tl.cdiv(tl.cdiv(end - begin, KEYS), SPLITS) * KEYS
    begin += split * per_split
    end = tl.minimum(end, begin + per_split)

    top = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, HEAD_WIDTH], tl.float32)
    t = tl.arange(0, KEYS)
    for tile in range(begin, end, KEYS):
        key = tile + t
        exists = key < end
        block = tl.load(tables + row * table_stride + key // BLOCK_SIZE, exists, 0).to(tl.int64)
        base = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
        # What lies in slots without a token may be NaN: it is masked here, not multiplied by 0.
        k_mask = exists[None, :] & in_head[:, None]
        keys = tl.load(pool + base[None, :] + d[:, None], k_mask, 0.0)
        v_mask = exists[:, None] & in_head[None, :]
        values = tl.load(pool + value_offset + base[:, None] + d[None, :], v_mask, 0.0)
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        if SOFT_CAP > 0:  # cap * tanh(score / cap); `scale` brings scores in units of log2(e)
            bounded = scores * (2.0 / SOFT_CAP)
            scores = (SOFT_CAP * 1.4426950408889634) * (1.0 - 2.0 / (1.0 + tl.exp2(bounded)))
        seen = exists[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        new_top = tl.maximum(top, tl.max(tl.where(seen, scores, -1e30), 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.where(seen, tl.exp2(scores - new_top[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        update = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        acc = acc * shrink[:, None] + update
        top = new_top

    heads = KV_HEADS * GROUP
    if SPLITS == 1:
        target = out + (place[:, None] * heads + head[:, None]) * HEAD_DIM + d[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), q_mask)
    else:
        part = ((place - first_row) * heads + head) * SPLITS + split
        tl.store(part_max + part, top, is_query)
        tl.store(part_sum + part, total, is_query)
        tl.store(part_out + part[:, None] * HEAD_DIM + d[None, :], acc, q_mask)


@triton.jit(do_not_specialize=["first_row"])
def _merge(
    part_out, part_max, part_sum, first_row, out,
    HEAD_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (token of the launch, head)."""
    start(DEPENDENT)
    wait(DEPENDENT)
    heads = tl.num_programs(1)
    place = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, HEAD_WIDTH)
    in_head = d < HEAD_DIM
    part = place * SPLITS + s
    tops = tl.load(part_max + part)
    weights = tl.exp2(tops - tl.max(tops, 0))
    total = tl.sum(tl.load(part_sum + part) * weights, 0)
    parts = tl.load(part_out + part[:, None] * HEAD_DIM + d[None, :], in_head[None, :], 0.0)
    merged = tl.sum(parts * weights[:, None], 0) / total
    place += first_row * heads
    tl.store(out + place * HEAD_DIM + d, merged.to(out.dtype.element_ty), in_head)


@dataclass(frozen=True, slots=True)
class Launch:
    """All that a kernel launch takes from the host."""

    first_row: int
    """First row with a prompt chunk. Each row before it decodes one token, so this is the index of
    its first token, too."""
    rows: int
    tokens: int
    tiles: int
    """Most tiles of queries that one row has."""
    queries: int
    keys: int
    splits: int
    warps: int
    stages: int


def launches(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    kv_heads: int,
    group: int,
    head_bytes: int,
    window: int | None = None,
) -> list[Launch]:
    """One launch for the leading decode rows, one for the prompt chunks behind them.

    head_bytes: of one key of one head. window: of the layers that this is for.
    """
    decodes = sum(1 for _ in takewhile(lambda length: length == 1, query_lens))
    found = []
    if decodes:
        found.append(_of_decodes(decodes, kv_heads, group, head_bytes, window))
    if decodes < len(query_lens):
        chunks, longest = query_lens[decodes:], max(context_lens[decodes:])
        # By what one query sees, whatever a chunk's length: so a start can try every split.
        longest = min(longest, window or longest)
        found.append(_of_chunks(decodes, chunks, longest, kv_heads, group, head_bytes))
    return found


def _of_decodes(
    rows: int, kv_heads: int, group: int, head_bytes: int, window: int | None
) -> Launch:
    splits = min(MAX_SPLITS, triton.next_power_of_2(-(-PROGRAMS // (rows * kv_heads))))
    queries, keys = max(16, triton.next_power_of_2(group)), 64 if _is_small(head_bytes) else 32
    if window is not None:  # each split has something to do
        splits = min(splits, triton.next_power_of_2(-(-window // keys)))
    return Launch(0, rows, rows, 1, queries, keys, splits, warps=2, stages=3)


def _of_chunks(
    first_row: int,
    query_lens: Sequence[int],
    longest: int,
    kv_heads: int,
    group: int,
    head_bytes: int,
) -> Launch:
    small = _is_small(head_bytes)
    queries = max(128 if small else 32, triton.next_power_of_2(group))
    tiles = [-(-length // (queries // group)) for length in query_lens]
    programs, splits = sum(tiles) * kv_heads, 1
    while (
        2 * programs * splits <= CHUNK_PROGRAMS
        and splits < MAX_SPLITS
        and longest >= 2 * splits * SPLIT_KEYS
    ):
        splits *= 2
    keys, warps, stages = (64, 8, 3) if small else (32, 4, 2)
    rows, tokens = len(query_lens), sum(query_lens)
    return Launch(first_row, rows, tokens, max(tiles), queries, keys, splits, warps, stages)


def _is_small(head_bytes: int) -> bool:
    """Whether heads leave room for three stages of large tiles."""
    return head_bytes <= 256


class TritonAttention:
    """Binds the steps of an engine to its KV pool. Heads of up to 256, shared in any way."""

    def __init__(self, cache: BlockedKVCache, spec: ModelSpec) -> None:
        layers = cache.layers
        self._layers = spec.layers
        self._windows = {layer.window for layer in spec.layers}
        self._pools = layers.unbind(0)
        self._value_offset = layers.stride(1)
        self._num_heads = spec.num_heads
        self._kv_heads, self._head_dim = layers.shape[3], layers.shape[5]
        self._group = spec.num_heads // self._kv_heads
        self._head_bytes = triton.next_power_of_2(self._head_dim) * layers.dtype.itemsize
        self._dependent = launches_early(layers.device)
        self._constants = {
            "KV_HEADS": self._kv_heads,
            "HEAD_DIM": self._head_dim,
            "BLOCK_SIZE": cache.block_size,
            "GROUP": self._group,
            "HEAD_WIDTH": max(16, triton.next_power_of_2(self._head_dim)),
            # Without "ieee", float32 would be multiplied as tf32.
            "PRECISION": "ieee" if layers.dtype == torch.float32 else "tf32",
            "DEPENDENT": self._dependent,
            "launch_pdl": self._dependent,
        }

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """Prepare a step: the result serves each of its layers."""
        plans = {window: self._plan(metadata, window) for window in self._windows}

        def attend(index: int, product: Tensor, rotation: Rotation, norm: QKNorm | None) -> Tensor:
            pool, layer = self._pools[index], self._layers[index]
            q = rotate_and_store(
                product, rotation, norm, pool, metadata.slot_mapping, self._num_heads,
                dependent=self._dependent,
            )  # fmt: skip
            out = empty_rows(q, *q.shape)
            for launch, room in plans[layer.window]:
                self._launch(launch, metadata, layer, q, pool, out, room)
            return out

        return attend

    def _plan(
        self, metadata: AttentionMetadata, window: int | None
    ) -> list[tuple[Launch, Parts | None]]:
        """The launches in a layer with that window, and room for their parts."""
        device = metadata.block_tables.device
        found = launches(
            metadata.query_lens,
            metadata.context_lens,
            self._kv_heads,
            self._group,
            self._head_bytes,
            window,
        )
        return [(one, self._parts(one, device) if one.splits > 1 else None) for one in found]

    def _launch(
        self,
        launch: Launch,
        metadata: AttentionMetadata,
        layer: LayerSpec,
        q: Tensor,
        pool: Tensor,
        out: Tensor,
        parts: Parts | None,
    ) -> None:
        tables = metadata.block_tables
        part_out, part_max, part_sum = parts or (out, out, out)
        # Scores come out in units of log2(e), for exp2.
        scale = layer.scale * LOG2_E
        _attend[(launch.rows, self._kv_heads * launch.splits, launch.tiles)](
            q, q.stride(0), pool, self._value_offset, tables, tables.stride(0),
            metadata.query_starts, metadata.device_context_lens, launch.first_row, scale,
            out, part_out, part_max, part_sum,
            **self._constants, WINDOW=layer.window or 0, SOFT_CAP=layer.soft_cap or 0.0,
            QUERIES=launch.queries, KEYS=launch.keys, SPLITS=launch.splits,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
        if parts:
            _merge[(launch.tokens, self._num_heads)](
                part_out, part_max, part_sum, launch.first_row, out,
                HEAD_DIM=self._head_dim, HEAD_WIDTH=self._constants["HEAD_WIDTH"],
                SPLITS=launch.splits, DEPENDENT=self._dependent,
                num_warps=1, launch_pdl=self._dependent,
            )  # fmt: skip

    def _parts(self, launch: Launch, device: torch.device) -> Parts:
        """float32 [tokens, heads, splits(, head_dim)]: unscaled outputs, maxima and sums."""
        shape = (launch.tokens, self._num_heads, launch.splits)
        maxima = torch.empty(shape, dtype=torch.float32, device=device)
        outputs = torch.empty((*shape, self._head_dim), dtype=torch.float32, device=device)
        return outputs, maxima, torch.empty_like(maxima)

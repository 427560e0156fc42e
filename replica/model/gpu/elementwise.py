"""What lies between the products of a layer: residual and norm, rotation, activation.

A product comes in parts, [parts, tokens, columns], that have yet to be added up: whoever reads it
does that on the way. Arithmetic is float32 whatever the type of the tensors.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

import triton
import triton.language as tl
from torch import Tensor

from replica.model.gpu.dependent_launch import start, wait
from replica.model.gpu.padding import empty_rows
from replica.model.norm import RMSNorm
from replica.model.rotary import QKNorm, Rotation
from replica.model.spec import Activation


@triton.jit
def _sum_of_parts(parts, part_stride, inside, PARTS: tl.constexpr):
    total = tl.load(parts, inside, 0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * part_stride, inside, 0.0).to(tl.float32)
    return total


@triton.jit
def _add_norm(
    parts, part_stride, residual, weight, out, eps,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, RESIDUAL: tl.constexpr,
    OFFSET: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (token). Without RESIDUAL the parts alone are normalised."""
    start(DEPENDENT)
    i = tl.arange(0, WIDTH)
    inside = i < COLUMNS
    scale = tl.load(weight + i, inside, 0.0).to(tl.float32) + OFFSET
    wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * COLUMNS + i
    if RESIDUAL:
        x = tl.load(residual + row, inside, 0.0).to(tl.float32)
        if PARTS > 0:
            x += _sum_of_parts(parts + row, part_stride, inside, PARTS)
            rounded = x.to(residual.dtype.element_ty)
            tl.store(residual + row, rounded, inside)
            x = rounded.to(tl.float32)
    else:
        x = _sum_of_parts(parts + row, part_stride, inside, PARTS)
    shrink = tl.rsqrt(tl.sum(x * x, 0) / COLUMNS + eps)
    tl.store(out + row, (x * shrink * scale).to(out.dtype.element_ty), inside)


@triton.jit
def _activate(
    gate_up, out,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns)."""
    start(DEPENDENT)
    wait(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < COLUMNS
    gate = tl.load(gate_up + token * 2 * COLUMNS + i, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * COLUMNS + COLUMNS + i, inside, 0.0).to(tl.float32)
    # Both are gate / (1 + e^-u): SiLU with u = gate, GELU in its tanh form with this.
    u = gate
    if GELU:
        u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1.0 + tl.exp(-u)) * up
    tl.store(out + token * COLUMNS + i, active.to(out.dtype.element_ty), inside)


@triton.jit
def _rotate_and_store(
    parts, part_stride, cos, sin, scale, eps, q, pool, value_offset, slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (token, TILE heads): queries go to `q`, keys and values to their slot of the pool."""
    start(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    HALF: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, WIDTH)[None, :]
    inside = (i < HALF) & (head < HEADS + 2 * KV_HEADS)
    slot = tl.load(slots + token)
    wait(DEPENDENT)
    source = parts + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + i
    a = _sum_of_parts(source, part_stride, inside, PARTS)
    b = _sum_of_parts(source + HALF, part_stride, inside, PARTS)
    turns = head < HEADS + KV_HEADS
    if NORM:
        shrink = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]
        place = scale + head * HEAD_DIM + i
        scale_a = tl.load(place, inside & turns, 0.0).to(tl.float32) + OFFSET
        scale_b = tl.load(place + HALF, inside & turns, 0.0).to(tl.float32) + OFFSET
        a = tl.where(turns, a * shrink * scale_a, a)
        b = tl.where(turns, b * shrink * scale_b, b)
    # The angles, too, were computed by a kernel of this step.
    c = tl.where(turns, tl.load(cos + token * HALF + i, i < HALF, 0.0), 1.0)
    s = tl.where(turns, tl.load(sin + token * HALF + i, i < HALF, 0.0), 0.0)
    first, second = a * c - b * s, b * c + a * s

    is_query = inside & (head < HEADS)
    target = q + (token * HEADS + head) * HEAD_DIM + i
    tl.store(target, first.to(q.dtype.element_ty), is_query)
    tl.store(target + HALF, second.to(q.dtype.element_ty), is_query)
    which, kv_head = (head - HEADS) // KV_HEADS, (head - HEADS) % KV_HEADS
    place = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    stored = inside & (head >= HEADS)
    target = pool + which * value_offset + place * HEAD_DIM + i
    tl.store(target, first.to(pool.dtype.element_ty), stored)
    tl.store(target + HALF, second.to(pool.dtype.element_ty), stored)


def add_norm(residual: Tensor, update: Tensor | None, norm: RMSNorm, *, dependent: bool) -> Tensor:
    """RMS norm of [T, C], after `update` [parts, T, C] was added in place."""
    out = empty_rows(residual, *residual.shape)
    parts, count = (residual, 0) if update is None else (update, len(update))
    _launch_norm(parts, count, residual, norm, out, dependent=dependent)
    return out


def normalised(product: Tensor, norm: RMSNorm, *, dependent: bool) -> Tensor:
    """RMS norm of the sum of [parts, T, C], as [1, T, C] of the norm's type."""
    out = empty_rows(norm.weight, *product.shape[1:])
    _launch_norm(product, len(product), None, norm, out, dependent=dependent)
    return out.unsqueeze(0)


def _launch_norm(
    parts: Tensor, count: int, residual: Tensor | None, norm: RMSNorm, out: Tensor,
    *, dependent: bool,
) -> None:  # fmt: skip
    tokens, columns = out.shape
    _add_norm[(tokens,)](
        parts, parts.stride(0), parts if residual is None else residual, norm.weight, out, norm.eps,
        COLUMNS=columns, WIDTH=triton.next_power_of_2(columns), PARTS=count,
        RESIDUAL=residual is not None, OFFSET=norm.offset, DEPENDENT=dependent,
        num_warps=8 if columns > 1024 else 4, launch_pdl=dependent,
    )  # fmt: skip


def activate(gate_up: Tensor, activation: Activation, *, dependent: bool) -> Tensor:
    """[T, 2C] to [T, C]: the first half through the activation, times the second half."""
    tokens, columns = len(gate_up), gate_up.shape[1] // 2
    out = empty_rows(gate_up, tokens, columns)
    block = 2048
    _activate[(tokens, triton.cdiv(columns, block))](
        gate_up, out, COLUMNS=columns, BLOCK=block, GELU=activation == "gelu_tanh",
        DEPENDENT=dependent, num_warps=8, launch_pdl=dependent,
    )  # fmt: skip
    return out


def rotate_and_store(
    product: Tensor, rotation: Rotation, norm: QKNorm | None,
    pool: Tensor, slots: Tensor, num_heads: int, *, dependent: bool,
) -> Tensor:  # fmt: skip
    """Split heads [parts, T, (heads + 2 kv_heads) * dim]: norm of queries and keys, if any,
    rotary embedding, keys and values into the pool [2, blocks, kv_heads, block_size, dim].

    Returns the queries, [T, heads * dim].
    """
    _, _, kv_heads, block_size, dim = pool.shape
    tokens = product.shape[1]
    q = pool.new_empty(tokens, num_heads * dim)
    scale, eps = (norm.scale, norm.eps) if norm else (rotation.cos, 0.0)
    tile = 8
    _rotate_and_store[(tokens, triton.cdiv(num_heads + 2 * kv_heads, tile))](
        product, product.stride(0), rotation.cos, rotation.sin, scale, eps,
        q, pool, pool.stride(0), slots,
        HEADS=num_heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_SIZE=block_size,
        WIDTH=triton.next_power_of_2(dim // 2), TILE=tile, PARTS=len(product),
        NORM=norm is not None, OFFSET=norm.offset if norm else 0.0, DEPENDENT=dependent,
        num_warps=2, launch_pdl=dependent,
    )  # fmt: skip
    return q

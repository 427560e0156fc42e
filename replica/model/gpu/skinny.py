"""Products of few tokens with a large weight, on Hopper GPUs: bound by the memory that the weight
streams from, so what counts is that the stream never stops.

Each program copies tiles of the weight into shared memory several stages ahead (TMA), and starts
with that before the kernel in front of it has ended: a weight depends on no other kernel. Only
the tokens have to wait. The weight is the left operand of the tensor cores, whose tiles are 64
high: that is what makes 16 tokens cost no more than one. A long product is split over programs
into parts that its reader adds up, in the same order each time.

Written in Gluon, Triton's lower level, because Triton decides by itself when it copies.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from replica.model.spec import Activation

MAX_TOKENS = 64
OUTPUTS, DEPTH = 64, 128
"""Size of a tile of a weight: rows (outputs of the layer), and columns (inputs)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product is computed."""

    stages: int
    """Tiles that a program keeps in flight."""
    splits: int
    """Parts into which the inputs are split; their products are added."""


def tile_tokens(tokens: int) -> int:
    """Tokens that a program computes, the rest is padding: 16, 32 or 64."""
    padded: int = triton.next_power_of_2(tokens)
    return max(16, padded)


def supported(weight: Tensor) -> bool:
    """Whether there is a kernel for products with this weight, [outputs, inputs]."""
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        return False
    outputs, inputs = weight.shape
    divides = outputs % (2 * OUTPUTS) == 0 and inputs % DEPTH == 0
    return divides and torch.cuda.get_device_capability(weight.device)[0] == 9


def plans(weight: Tensor, tokens: int, *, gated: bool, whole: bool) -> list[Plan]:
    """What can be tried for a weight. whole: the product must not come in parts."""
    stage_bytes = 2 * DEPTH * (OUTPUTS * (1 + gated) + tile_tokens(tokens))
    steps = weight.shape[1] // DEPTH
    return [
        Plan(stages, splits)
        for stages in (3, 4)
        for splits in ((1,) if gated or whole else (1, 2, 4))
        if stages * stage_bytes < 200_000 and steps % splits == 0 and steps // splits >= stages
    ]


@gluon.jit(do_not_specialize=["tokens"])
def _product(
    x, weight, bias, out, tokens, outputs, depth,
    TOKENS: gl.constexpr, OUTPUTS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, GELU: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, part). depth: inputs of one part. outputs: of one token."""
    tile, part = gl.program_id(0) * OUTPUTS, gl.program_id(1)
    begin = part * depth
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, OUTPUTS, DEPTH], weight.layout)
    ups = weights
    if GATED:
        ups = gl.allocate_shared_memory(gl.bfloat16, [STAGES, OUTPUTS, DEPTH], weight.layout)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, DEPTH], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    BYTES: gl.constexpr = (OUTPUTS * (2 if GATED else 1) + TOKENS) * DEPTH * 2
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        bar, k = arrived.index(stage), begin + stage * DEPTH
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(weight, [tile, k], bar, weights.index(stage))
        if GATED:
            tma.async_copy_global_to_shared(weight, [outputs + tile, k], bar, ups.index(stage))
    # `start` and `wait` of `replica.model.gpu.dependent_launch`, which Gluon cannot call.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    for stage in gl.static_range(STAGES):
        bar = arrived.index(stage)
        tma.async_copy_global_to_shared(x, [0, begin + stage * DEPTH], bar, xs.index(stage))

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16]
    )
    acc = gl.zeros([OUTPUTS, TOKENS], gl.float32, layout)
    up = gl.zeros([OUTPUTS, TOKENS], gl.float32, layout)
    steps = depth // DEPTH
    for step in range(steps):
        slot = step % STAGES
        full = arrived.index(slot)
        mbarrier.wait(full, step // STAGES & 1)
        right = xs.index(slot).permute((1, 0))
        acc = warpgroup_mma(weights.index(slot), right, acc, is_async=True)
        if GATED:
            up = warpgroup_mma(ups.index(slot), right, up, is_async=True)
            acc, up = warpgroup_mma_wait(num_outstanding=0, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        # The tensor cores are done with this stage: refill it.
        more = step + STAGES < steps
        next_k = begin + (step + STAGES) * DEPTH
        mbarrier.expect(full, BYTES, pred=more)
        tma.async_copy_global_to_shared(
            weight, [tile, next_k], full, weights.index(slot), pred=more
        )
        if GATED:
            tma.async_copy_global_to_shared(
                weight, [outputs + tile, next_k], full, ups.index(slot), pred=more
            )
        tma.async_copy_global_to_shared(x, [0, next_k], full, xs.index(slot), pred=more)

    output = tile + gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    if BIAS:
        added = gl.load(bias + output).to(gl.float32)
        acc += (added * (part == 0))[:, None]
    if GATED:
        u = acc  # as in `replica.model.gpu.elementwise`
        if GELU:
            u = 1.5957691216057308 * (acc + 0.044715 * acc * acc * acc)
        acc = acc / (1.0 + gl.exp(-u)) * up
    place = (part.to(gl.int64) * tokens + token[None, :]) * outputs + output[:, None]
    gl.store(out + place, acc.to(out.dtype.element_ty), (token < tokens)[None, :])


def _tiles(tensor: Tensor, height: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(tensor, [height, DEPTH], layout)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan,
    *, activation: Activation | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [T, inputs] times weight [outputs, inputs], in parts: [splits, T, outputs].

    activation: of the first half of the outputs, times the second half: half as many.
    float32 where there is more than one part. out: where the only part goes, of any type.
    """
    gated = activation is not None
    tokens, outputs = len(x), weight.shape[0] // (1 + gated)
    if out is None:
        dtype = x.dtype if plan.splits == 1 else torch.float32
        out = x.new_empty(plan.splits, tokens, outputs, dtype=dtype)
    padded = tile_tokens(tokens)
    _product[(outputs // OUTPUTS, plan.splits)](
        _tiles(x, padded), _tiles(weight, OUTPUTS), weight if bias is None else bias, out,
        tokens, outputs, x.shape[1] // plan.splits,
        TOKENS=padded, OUTPUTS=OUTPUTS, DEPTH=DEPTH, STAGES=plan.stages,
        GATED=gated, GELU=activation == "gelu_tanh", BIAS=bias is not None,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out

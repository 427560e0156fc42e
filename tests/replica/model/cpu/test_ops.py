"""The arithmetic of a layer on a CPU, each kind against float64."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from replica.model.attention.backends import paged_attention
from replica.model.cpu import onednn
from replica.model.cpu.attention import NativeAttention
from replica.model.cpu.native import NativeOps
from replica.model.cpu.onednn import OneDnnOps
from replica.model.layer_ops import TorchOps
from replica.model.linear import Linear
from replica.model.norm import RMSNorm
from replica.model.rotary import QKNorm, Rotation, rotate_
from tests.replica.paged import attention_spec

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(scope="module", params=["native", "onednn"])
def make_ops(request: pytest.FixtureRequest):
    def make(dtype: torch.dtype) -> TorchOps:
        if request.param == "native":
            return NativeOps(request.getfixturevalue("kernels"), dtype)
        if not onednn.is_available(dtype):
            pytest.skip("oneDNN has no packed weights of this type for this CPU")
        return OneDnnOps()

    return make


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False) -> Linear:
    layer = Linear(inputs, outputs, bias, CPU, dtype).requires_grad_(False)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.copy_(randn(*parameter.shape, seed=seed) / inputs**0.5)
    return layer


def product(x: Tensor, layer: Linear) -> Tensor:
    """In float64."""
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(x.double(), layer.weight.double(), bias)


def assert_near(found: Tensor, exact: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


@dtypes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 80), (576, 33), (10, 1), (7, 64)])
def test_products(make_ops, dtype, bias, rows, inputs, outputs) -> None:
    layer, x = linear(inputs, outputs, dtype, bias=bias), randn(rows, inputs, dtype=dtype, seed=9)
    exact, ops = product(x, layer), make_ops(dtype)
    assert_near(ops.linear(x, layer), exact, TOLERANCE[dtype])
    ops.pack(layer)
    assert_near(ops.linear(x, layer), exact, TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 5, 30])
@pytest.mark.parametrize("width", [64, 24])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_products(make_ops, dtype, rows, width, activation, bias) -> None:
    """The second width is no multiple of what a vector holds."""
    layer, x = linear(32, 2 * width, dtype, bias=bias), 3 * randn(rows, 32, dtype=dtype, seed=9)
    gate, up = product(x, layer).chunk(2, -1)
    exact = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    ops = make_ops(dtype)
    ops.pack(layer)
    assert_near(ops.gated(x, layer, activation), exact, 3 * TOLERANCE[dtype])


@dtypes
def test_an_epilogue_stands_between_a_product_and_its_reader(make_ops, dtype) -> None:
    """As of an adapter: its part is in what is normalised, and in what is activated."""
    ops, x = make_ops(dtype), randn(5, 32, dtype=dtype, seed=9)
    layer, down, up = (linear(32, 64, dtype, bias=True), randn(32, 4, seed=7), randn(4, 64, seed=8))
    exact = product(x, layer) + x.double() @ down.double() @ up.double()
    layer.epilogue = lambda x, product: product + (x.float() @ down @ up).to(dtype)
    for packed in (False, True):
        if packed:
            ops.pack(layer)
        assert_near(ops.linear(x, layer), exact, 10 * TOLERANCE[dtype])
        gate, upper = exact.chunk(2, -1)
        found = ops.gated(x, layer, "silu")
        torch.testing.assert_close(found.double(), F.silu(gate) * upper, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_an_activation_far_from_zero_overflows_nothing(kernels: CDLL, activation) -> None:
    ops, layer = NativeOps(kernels, torch.float32), linear(2, 64, torch.float32)
    layer.weight.fill_(1.0)
    ops.pack(layer)
    x = torch.tensor([[-300.0, 0], [-80.0, 0], [0.0, 0], [80.0, 0], [300.0, 0]])
    active = F.silu if activation == "silu" else F.relu  # so far out
    exact = (active(x[:, :1].double()) * x[:, :1]).expand(-1, 32)
    assert_near(ops.gated(x, layer, activation), exact, 1e-6)


def test_what_is_not_a_number_stays_so(kernels: CDLL) -> None:
    """A row that went wrong must not look right; its neighbours are unharmed."""
    for dtype in TOLERANCE:
        ops, layer = NativeOps(kernels, dtype), linear(32, 64, dtype)
        ops.pack(layer)
        x = randn(3, 32, dtype=dtype)
        whole = ops.gated(x, layer, "silu")
        x[1] = torch.nan
        found = ops.gated(x, layer, "silu")
        assert found[1].isnan().all()
        torch.testing.assert_close(found[[0, 2]], whole[[0, 2]], rtol=0, atol=0)
        assert ops.linear(x, layer)[1].isnan().all()


@dtypes
@pytest.mark.parametrize("rows", [0, 2, 9])
def test_logits_are_float32_whatever_the_weights(make_ops, dtype, rows) -> None:
    layer, x = linear(64, 99, dtype), randn(rows, 64, dtype=dtype, seed=9)
    exact, ops, out = product(x, layer), make_ops(dtype), torch.full((rows, 99), torch.nan)
    ops.pack(layer)
    ops.logits(x, layer, out)
    assert_near(out, exact, TOLERANCE[dtype] if isinstance(ops, OneDnnOps) else 1e-5)


@dtypes
@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("width", [50, 576])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_add_and_norm(make_ops, dtype, rows, width, offset) -> None:
    residual, update = (randn(rows, width, dtype=dtype, seed=seed) for seed in (1, 2))
    norm = RMSNorm(width, 1e-5, dtype=dtype, offset=offset).requires_grad_(False)
    norm.weight.copy_(randn(width, seed=3))
    added = residual + update
    wide = added.double()
    exact = (
        wide
        * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        * (norm.weight.double() + offset)
    )
    ops = make_ops(dtype)
    assert_near(ops.add_norm(residual, update, norm), exact, 2 * TOLERANCE[dtype])
    torch.testing.assert_close(residual, added, rtol=0, atol=0)
    assert_near(ops.add_norm(residual, None, norm), exact, 2 * TOLERANCE[dtype])
    torch.testing.assert_close(residual, added, rtol=0, atol=0)


@given(
    inputs=st.integers(1, 40).map(lambda half: 2 * half),
    outputs=st.integers(1, 100),
    rows=st.integers(1, 20),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_a_rows_product_depends_on_that_row_alone(
    kernels: CDLL, inputs: int, outputs: int, rows: int, dtype: torch.dtype
) -> None:
    layer, x = linear(inputs, outputs, dtype), randn(rows, inputs, dtype=dtype, seed=9)
    exact, ops = product(x, layer), NativeOps(kernels, dtype)
    ops.pack(layer)
    together = ops.linear(x, layer)
    assert_near(together, exact, TOLERANCE[dtype])
    for row in range(rows):
        alone = ops.linear(x[row : row + 1], layer)[0]
        torch.testing.assert_close(alone, together[row], rtol=0, atol=0)


def test_packing_lets_go_of_the_plain_weight_unless_it_is_shared(make_ops) -> None:
    ops, layer, shared = make_ops(torch.float32), linear(48, 80, torch.float32), torch.ones(80, 48)
    layer.weight = torch.nn.Parameter(shared)
    ops.pack(layer)
    assert not list(layer.parameters())
    torch.testing.assert_close(ops.linear(torch.ones(1, 48), layer), torch.full((1, 80), 48.0))


@dtypes
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("tokens", [1, 40])
def test_rotation_and_the_write_to_the_pool(kernels, dtype, offset, tokens) -> None:
    heads, kv_heads, dim = 6, 2, 32
    spec = attention_spec(heads, kv_heads, dim, 1)
    turned = randn(tokens, 1, dim // 2, seed=1)
    cos, sin = turned.cos(), turned.sin()
    rotation = Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
    scale = randn(heads + kv_heads, dim, dtype=dtype, seed=2)
    norm = None if offset is None else QKNorm(scale, 1e-5, offset)
    product = randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype, seed=3)
    expected = product.clone()
    rotate_(expected[:, :-kv_heads], rotation, norm)

    cache, attention = paged_attention(spec, 3, 16, dtype, CPU, kernels)
    assert isinstance(attention, NativeAttention)
    cache.layers.fill_(torch.nan)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(4))[:tokens]
    attention._store(product, rotation, norm, cache.layers[0], slots)
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(product, expected, rtol=tolerance, atol=tolerance)
    kept = product[:, heads:].view(tokens, 2, kv_heads, dim)
    torch.testing.assert_close(cache.layers[0, slots], kept, rtol=0, atol=0)
    cache.layers[0, slots] = torch.nan
    assert cache.layers.isnan().all()


def test_heads_of_a_size_without_a_kernel_are_left_to_torch(kernels: CDLL) -> None:
    _, attention = paged_attention(attention_spec(6, 2, 24, 1), 3, 16, torch.float32, CPU, kernels)
    assert not isinstance(attention, NativeAttention)

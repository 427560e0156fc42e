"""The fused kernels of a layer against float64."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
import torch

from replica.model.decoder import Decoder
from replica.model.kv_cache import BlockedKVCache
from replica.model.linear import Linear
from replica.model.norm import RMSNorm
from replica.model.rotary import QKNorm, Rotation, angles, rotate_
from replica.model.spec import LayerSpec, ModelSpec
from tests.replica.paged import attention_spec

SPEC = ModelSpec(
    model_type="llama",
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    max_position=4096,
    norm_eps=1e-5,
    layers=(LayerSpec(frequencies=tuple(0.9**i for i in range(32)), scale=0.125),) * 3,
)


ACTIVE = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


def randn(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def linear(outputs: int, inputs: int, *, bias: bool = False) -> Linear:
    layer = Linear(inputs, outputs, bias, torch.device("cuda"), torch.bfloat16)
    layer.weight.data.normal_(0, 0.05)
    if bias:
        layer.bias.data.normal_()
    return layer


def norm_of(columns: int, dtype: torch.dtype, offset: float) -> RMSNorm:
    norm = RMSNorm(columns, 1e-5, offset=offset, dtype=dtype, device=torch.device("cuda"))
    norm.weight.data.normal_()
    return norm


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 17, 31, 32, 33, 50, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 512), (6144, 4096), (384, 14336)], ids=str)
def test_products_of_few_tokens(tokens, outputs, inputs):
    from replica.model.gpu.skinny import plans, product

    layer, x = linear(outputs, inputs, bias=True), randn(tokens, inputs)
    expected = x.double() @ layer.weight.double().t() + layer.bias.double()
    tried = plans(layer.weight, tokens, gated=False, whole=False)
    assert {plan.splits for plan in tried} >= {1}
    for plan in tried:
        parts = product(x, layer.weight, layer.bias, plan)
        assert parts.shape == (plan.splits, tokens, outputs)
        assert error(parts.double().sum(0), expected) < 3e-3, plan


@pytest.mark.parametrize("tokens", [1, 16, 30, 64])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_products_with_a_gate_and_products_that_are_logits(tokens, activation):
    from replica.model.gpu.skinny import plans, product

    layer, x = linear(2048, 1024), randn(tokens, 1024)
    exact = x.double() @ layer.weight.double().t()
    gate, up = exact.chunk(2, -1)
    for plan in plans(layer.weight, tokens, gated=True, whole=False):
        both = product(x, layer.weight, None, plan, activation=activation)[0]
        assert error(both, ACTIVE[activation](gate) * up) < 5e-3, plan
    for plan in plans(layer.weight, tokens, gated=False, whole=True):
        out = torch.full((tokens + 1, 2048), torch.nan, device="cuda")
        product(x, layer.weight, None, plan, out=out[:tokens])
        assert error(out[:tokens], exact) < 1e-5, plan
        assert bool(out[tokens:].isnan().all()), "wrote beyond its tokens"


@pytest.mark.parametrize("tokens", [1, 32, 64])
def test_products_with_a_large_vocabulary(tokens):
    from replica.model.gpu.skinny import plans, product

    layer, x = linear(128_256, 4096), randn(tokens, 4096)
    expected = x.float() @ layer.weight.float().t()
    for plan in plans(layer.weight, tokens, gated=False, whole=True):
        out = torch.empty(tokens, 128_256, device="cuda")
        product(x, layer.weight, None, plan, out=out)
        assert error(out, expected) < 1e-4, plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [None, 1, 4])
@pytest.mark.parametrize("columns", [64, 576, 4096])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_residual_and_norm(dtype, parts, columns, offset):
    from replica.model.gpu.elementwise import add_norm

    residual, norm = randn(5, columns, dtype=dtype), norm_of(columns, dtype, offset)
    update = None if parts is None else randn(parts, 5, columns, dtype=torch.float32)
    total = residual.double() + (0 if update is None else update.double().sum(0))
    total = total.to(dtype).double()
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected *= norm.weight.double() + offset
    got = add_norm(residual, update, norm, dependent=True)
    limit = 1e-6 if dtype == torch.float32 else 4e-3
    assert error(residual, total) < limit
    assert error(got, expected) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [1, 4])
def test_the_norm_of_a_product(dtype, parts):
    """Which comes in float32 where it comes in parts, and is one of the norm's type then."""
    from replica.model.gpu.elementwise import normalised

    norm = norm_of(576, dtype, 1.0)
    product = randn(parts, 5, 576, dtype=dtype if parts == 1 else torch.float32)
    total = product.double().sum(0)
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected *= norm.weight.double() + 1.0
    got = normalised(product, norm, dependent=True)
    assert (got.shape, got.dtype) == ((1, 5, 576), dtype)
    assert error(got[0], expected) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activation(activation):
    from replica.model.gpu.elementwise import activate

    both = randn(300, 2 * 3000, dtype=torch.float32)
    gate, up = both.double().chunk(2, -1)
    got = activate(both, activation, dependent=True)
    assert error(got, ACTIVE[activation](gate) * up) < 1e-6


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_rotation_and_cache_write(dim, parts, offset):
    from replica.model.gpu.elementwise import rotate_and_store

    tokens, heads, kv_heads, device = 9, 6, 2, torch.device("cuda")
    cache = BlockedKVCache(attention_spec(heads, kv_heads, dim, 1), 8, 16, torch.float32, device)
    cache.layers.fill_(torch.nan)
    product = randn(parts, tokens, (heads + 2 * kv_heads) * dim, dtype=torch.float32)
    slots = torch.randperm(128, device=device)[:tokens]
    cos, sin = angles(
        torch.randint(1000, (tokens,), device=device), torch.rand(dim // 2, device=device)
    )
    scale = randn(heads + kv_heads, dim, dtype=torch.float32)
    qk_norm = None if offset is None else QKNorm(scale, 1e-5, offset)
    q = rotate_and_store(
        product, Rotation(cos, sin), qk_norm, cache.layers[0], slots, heads, dependent=True
    )
    whole = product.sum(0).view(tokens, -1, dim)
    doubled = Rotation(
        torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
    )
    rotate_(whole[:, : heads + kv_heads], doubled, qk_norm)
    stored = cache.layers[0][:, slots // 16, :, slots % 16]
    assert error(q.view(tokens, heads, dim), whole[:, :heads]) < 1e-6
    assert error(stored[:, 0], whole[:, heads : heads + kv_heads]) < 1e-6
    assert error(stored[:, 1], whole[:, heads + kv_heads :]) < 1e-6
    assert int((~cache.layers[0].isnan()).sum()) == tokens * 2 * kv_heads * dim


def random_decoder(device) -> Decoder:
    decoder = Decoder(SPEC, torch.bfloat16, device.memory)
    for name, parameter in decoder.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.05)
    return decoder


def step_of(decoder: Decoder, rows: int) -> torch.Tensor:
    """Logits of a decode step after random contexts."""
    from replica.model.attention.backends import paged_attention
    from replica.model.attention.metadata import AttentionMetadata

    torch.manual_seed(1)
    ints = {"dtype": torch.int32, "device": "cuda"}
    cache, attention = paged_attention(SPEC, rows, 16, torch.bfloat16, torch.device("cuda"))
    cache.layers.normal_()
    contexts = [1 + i % 16 for i in range(rows)]
    lengths = torch.tensor(contexts, **ints)
    attend = attention.bind(
        AttentionMetadata(
            query_lens=[1] * rows,
            context_lens=contexts,
            block_tables=torch.arange(rows, **ints)[:, None],
            slot_mapping=torch.arange(rows, device="cuda") * 16 + lengths - 1,
            query_starts=torch.arange(rows + 1, **ints),
            device_context_lens=lengths,
        )
    )
    logits = torch.empty(rows, SPEC.vocab_size, device="cuda")
    tokens, index = torch.randint(SPEC.vocab_size, (rows,), device="cuda"), torch.arange(rows)
    decoder(tokens, lengths.long() - 1, attend, index.cuda(), logits)
    return logits


@pytest.mark.parametrize("rows", [1, 12, 63, 64, 65, 80])
def test_round_numbers_of_tokens_change_nothing(device, rows):
    """And logits go where there is room, at the end of their buffer, too."""
    decoder = random_decoder(device)
    before = step_of(decoder, rows)
    decoder.ops = decoder.ops.for_chunks()
    assert decoder.ops.rounds
    assert error(step_of(decoder, rows), before) < 2e-2


def test_tuned_products_are_as_exact_and_remembered(device, tmp_path):
    from replica.model.gpu.tuning import tune

    decoder = random_decoder(device)
    before = {rows: step_of(decoder, rows) for rows in (1, 12, 32, 64, 80)}
    tune(decoder, 64, device, str(tmp_path))
    (file,) = tmp_path.glob("products-*.json")
    found = dict(decoder.ops.plans)
    assert {key.tokens for key in found} == {16, 32, 64}
    assert {key.kind for key in found} == {"linear", "gated", "logits"}
    for rows, logits in before.items():
        assert error(step_of(decoder, rows), logits) < 2e-2
    written = file.stat().st_mtime_ns
    again = random_decoder(device)
    tune(again, 64, device, str(tmp_path))
    assert again.ops.plans == found
    assert file.stat().st_mtime_ns == written, "measured again"


def test_a_spoiled_or_absent_memory_is_no_error(device, tmp_path):
    from replica.model.gpu.tuning import tune

    tune(random_decoder(device), 1, device, str(tmp_path))
    (file,) = tmp_path.glob("products-*.json")
    sound = file.read_bytes()
    for spoiled in (b"{", b"[]", b"\xff", sound.replace(b"stages", b"steps"), b"{}"):
        file.write_bytes(spoiled)
        decoder = random_decoder(device)
        tune(decoder, 1, device, str(tmp_path))
        assert decoder.ops.plans.keys() == {key for key in decoder.ops.plans if key.tokens == 16}
        assert msgspec.json.decode(file.read_bytes()).keys() == msgspec.json.decode(sound).keys()
    impossible = {name: {"stages": 9, "splits": 7} for name in msgspec.json.decode(sound)}
    file.write_bytes(msgspec.json.encode(impossible))
    decoder = random_decoder(device)
    tune(decoder, 1, device, str(tmp_path))
    assert all(plan is None or plan.splits != 7 for plan in decoder.ops.plans.values())
    unwritable = tmp_path / "file"
    unwritable.write_text("")
    tune(random_decoder(device), 1, device, str(unwritable / "below"))

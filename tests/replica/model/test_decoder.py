from __future__ import annotations

import random
from ctypes import CDLL
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, PreTrainedModel

from replica.model.cpu import onednn
from replica.model.cpu.native import NativeOps
from replica.model.cpu.onednn import OneDnnOps
from replica.model.cpu.pack import pack
from replica.model.decoder import Decoder
from replica.model.layer_ops import TorchOps
from replica.model.linear import Linear
from replica.model.loading import load_decoder, load_spec
from replica.model.runner import DecoderRunner
from replica.model.spec import Activation
from tests.families import VARIANTS
from tests.models import VOCAB_SIZE, random_model, save
from tests.replica.paged import PagedModel
from tests.script import Bench, submit

CPU = torch.device("cpu")


def arithmetic(name: str, request: pytest.FixtureRequest, dtype: torch.dtype) -> TorchOps:
    """One of the three that a CPU may have."""
    if name == "native":
        return NativeOps(request.getfixturevalue("kernels"), dtype)
    if name == "onednn" and not onednn.is_available(dtype):
        pytest.skip("oneDNN has no packed weights of this type for this CPU")
    return OneDnnOps() if name == "onednn" else TorchOps()


@pytest.fixture(scope="module", params=["native", "torch"])
def ops(request: pytest.FixtureRequest) -> TorchOps:
    return arithmetic(request.param, request, torch.float32)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ops: TorchOps
) -> tuple[PreTrainedModel, Decoder]:
    """A model of transformers, and ours with the same weights."""
    family, options = VARIANTS[request.param]
    reference = random_model(family, **options)
    folder = save(reference, tmp_path_factory.mktemp("model"))
    decoder = load_decoder(folder, None, torch.float32, CPU)
    pack(decoder, ops)
    return reference, decoder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, str]:
    reference = random_model()
    return reference, save(reference, tmp_path_factory.mktemp("tiny"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


@torch.no_grad()
def expected(reference: PreTrainedModel, tokens: list[int]) -> Tensor:
    logits: Tensor = reference(torch.tensor([tokens])).logits[0].float()
    return logits


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_prompt_in_one_step_has_the_logits_of_transformers(
    pair: tuple[PreTrainedModel, Decoder],
) -> None:
    reference, decoder = pair
    tokens = prompt(200)
    logits = PagedModel(decoder).run({"a": tokens})["a"]
    assert logits.dtype == torch.float32
    assert_same(logits, expected(reference, tokens))


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_has_the_logits_of_transformers(
    pair: tuple[PreTrainedModel, Decoder], seed: int
) -> None:
    """Chunks, decode rows and mixed steps, in any order, with rows that join and pause (C40)."""
    reference, decoder = pair
    chance = random.Random(seed)
    tokens = {name: prompt(chance.randint(1, 90), seed=ord(name)) for name in "abcd"}
    rest = dict(tokens)
    found: dict[str, list[Tensor]] = {name: [] for name in tokens}
    model = PagedModel(decoder, seed=seed)
    while any(rest.values()):
        names = [name for name in rest if rest[name] and chance.random() < 0.7]
        sizes = {name: chance.choice([1, 1, 1, 3, 4, 17]) for name in names}
        step = {name: rest[name][: sizes[name]] for name in names}
        for name, logits in (model.run(step) if step else {}).items():
            found[name].append(logits)
            rest[name] = rest[name][sizes[name] :]
    for name, sequence in tokens.items():
        assert_same(torch.cat(found[name]), expected(reference, sequence))


def test_greedy_continuation_is_that_of_generate(pair: tuple[PreTrainedModel, Decoder]) -> None:
    reference, decoder = pair
    prompts = {str(length): prompt(length, seed=length) for length in (3, 20, 41)}
    model = PagedModel(decoder)
    outputs: dict[str, list[int]] = {name: [] for name in prompts}
    step = prompts
    for _ in range(24):
        logits = model.run(step)
        step = {name: [int(rows[-1].argmax())] for name, rows in logits.items()}
        for name, tokens in step.items():
            outputs[name] += tokens
    for name, tokens in prompts.items():
        generated = reference.generate(
            torch.tensor([tokens]), max_new_tokens=24, do_sample=False, eos_token_id=-1
        )
        assert outputs[name] == generated[0, len(tokens) :].tolist()


def test_logits_of_a_few_tokens_are_those_of_all_tokens(
    tiny: tuple[PreTrainedModel, str],
) -> None:
    decoder = load_decoder(tiny[1], None, torch.float32, CPU)
    tokens, positions = torch.tensor(prompt(9)), torch.arange(9)

    def attend(layer: int, product: Tensor, *angles: object) -> Tensor:
        return product[:, : decoder.spec.num_heads * decoder.spec.head_dim]

    def logits_at(*index: int) -> Tensor:
        found = torch.full((len(index), VOCAB_SIZE), torch.nan)
        wanted = torch.tensor(index, dtype=torch.int64)
        decoder(tokens, positions, attend, wanted, found)
        return found

    assert_same(logits_at(7, 2), logits_at(*range(9))[[7, 2]])
    assert logits_at().shape == (0, VOCAB_SIZE)


def test_a_token_does_not_see_how_far_its_neighbours_are(
    tiny: tuple[PreTrainedModel, str],
) -> None:
    """Rotary angles come from a token's own position, whatever else is in the step."""
    decoder = load_decoder(tiny[1], None, torch.float32, CPU)
    alone = PagedModel(decoder).run({"a": prompt(30)})["a"]
    crowded = PagedModel(decoder)
    crowded.run({"b": prompt(480, seed=1)})
    beside = crowded.run({"a": prompt(30), "b": prompt(20, seed=2)})["a"]
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["native", "onednn", "torch"])
def test_bfloat16_is_as_close_to_float32_as_in_transformers(
    tiny: tuple[PreTrainedModel, str], name: str, request: pytest.FixtureRequest
) -> None:
    """Within 1.2 times the root mean square error that transformers makes in bfloat16."""
    reference, folder = tiny
    tokens = prompt(300)
    exact = expected(reference, tokens)
    theirs = expected(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), tokens)
    decoder = load_decoder(folder, None, torch.bfloat16, CPU)
    pack(decoder, arithmetic(name, request, torch.bfloat16))
    model = PagedModel(decoder)
    first = model.run({"a": tokens[:280]})["a"]
    ours = torch.cat([first, *(model.run({"a": [token]})["a"] for token in tokens[280:])])

    def error(logits: Tensor) -> float:
        return float((logits - exact).square().mean().sqrt())

    assert 0 < error(ours) <= 1.2 * error(theirs)


@pytest.mark.parametrize("name", ["native", "onednn"])
def test_packed_weights_give_the_same_logits(
    tiny: tuple[PreTrainedModel, str], name: str, request: pytest.FixtureRequest
) -> None:
    _, folder = tiny
    plain, packed = (load_decoder(folder, None, torch.float32, CPU) for _ in range(2))
    pack(packed, arithmetic(name, request, torch.float32))
    assert all(module.format is not None for module in linear_layers(packed))
    tokens = prompt(100)
    assert_same(
        PagedModel(packed).run({"a": tokens})["a"], PagedModel(plain).run({"a": tokens})["a"]
    )


def test_a_row_gives_the_same_bits_however_many_are_computed_with_it(
    tiny: tuple[PreTrainedModel, str], kernels: CDLL
) -> None:
    """So that a seed gives the same answer on a busy server."""
    decoder = load_decoder(tiny[1], None, torch.bfloat16, CPU)
    pack(decoder, NativeOps(kernels, torch.bfloat16))

    def logits(others: int) -> Tensor:
        model = PagedModel(decoder)
        model.run({"a": prompt(20)})
        for other in range(others):
            model.run({str(other): prompt(5 + other, seed=other)})
        return model.run({"a": [1]} | {str(other): [2] for other in range(others)})["a"]

    alone = logits(0)
    for others in (1, 7, 8, 20):
        torch.testing.assert_close(logits(others), alone, rtol=0, atol=0)


class Float8Format:
    """A weight of eight bits with a scale for each output, as one that is quantised would be."""

    def __init__(self, weight: Tensor) -> None:
        self._scale = weight.abs().amax(1, keepdim=True) / 448
        self._stored = (weight / self._scale).to(torch.float8_e4m3fn)

    def weight(self) -> Tensor:
        return self._stored.float() * self._scale

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight(), bias)

    def gated(self, x: Tensor, activation: Activation) -> None:
        """Left to the operations of the device."""

    def logits(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.product(x, None))


def test_a_format_of_weights_is_a_class_of_its_own(
    tiny: tuple[PreTrainedModel, str], ops: TorchOps
) -> None:
    """Beside layers that are packed for the device."""
    rounded, formatted = (load_decoder(tiny[1], None, torch.float32, CPU) for _ in range(2))
    for index, (plain, layer) in enumerate(
        zip(linear_layers(rounded), linear_layers(formatted), strict=True)
    ):
        if index % 3:
            made = Float8Format(layer.weight)
            plain.weight.copy_(made.weight())
            layer.replace_weight(made)
    pack(formatted, ops)
    tokens = prompt(60)
    found = PagedModel(formatted).run({"a": tokens})["a"]
    assert_same(found, PagedModel(rounded).run({"a": tokens})["a"])


def test_adapters_equal_merged_weights(tiny: tuple[PreTrainedModel, str], ops: TorchOps) -> None:
    """One at every layer, by its epilogue: a sum of products of few inputs."""
    merged, adapted = (load_decoder(tiny[1], None, torch.float32, CPU) for _ in range(2))
    for merging, adapting in zip(linear_layers(merged), linear_layers(adapted), strict=True):
        if merging is merged.head:
            continue
        down = torch.randn(merging.in_features, 2) / 8
        up = torch.randn(2, merging.out_features) / 8
        merging.weight += (down @ up).t()
        adapting.epilogue = partial(_adapt, down, up)
    pack(merged, ops)
    pack(adapted, ops)
    tokens = prompt(60)
    found = PagedModel(adapted).run({"a": tokens})["a"]
    assert_same(found, PagedModel(merged).run({"a": tokens})["a"])
    next(adapted.blocks()).down.epilogue = None
    assert not torch.allclose(PagedModel(adapted).run({"a": tokens})["a"], found, atol=1e-2)


def _adapt(down: Tensor, up: Tensor, x: Tensor, product: Tensor) -> Tensor:
    return product.addmm_(x @ down, up)


def linear_layers(decoder: Decoder) -> list[Linear]:
    return [module for module in decoder.modules() if isinstance(module, Linear)]


def test_the_decoder_keeps_no_gradients(tiny: tuple[PreTrainedModel, str]) -> None:
    decoder = load_decoder(tiny[1], None, torch.float32, CPU)
    assert not any(parameter.requires_grad for parameter in decoder.parameters())


def test_a_token_gives_the_same_bits_however_its_prompt_was_cut(
    tiny: tuple[PreTrainedModel, str], kernels: CDLL
) -> None:
    """So that an answer goes on elsewhere as it would have here."""
    decoder = load_decoder(tiny[1], None, torch.float32, CPU)
    pack(decoder, NativeOps(kernels, torch.float32))
    tokens = prompt(120)
    whole = PagedModel(decoder).run({"a": tokens})["a"]
    model = PagedModel(decoder, seed=1)
    cuts = [0, 50, 51, 52, 60, 119, 120]
    parts = [model.run({"a": tokens[a:b]})["a"] for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


def test_a_step_in_which_nobody_samples_asks_for_no_logits(
    tiny: tuple[PreTrainedModel, str],
) -> None:
    """A prompt longer than a step, alone. Kernels of a GPU take no product of no rows."""

    class NoEmptyProducts(TorchOps):
        def logits(self, x: Tensor, head: Linear, out: Tensor) -> None:
            assert len(x) > 0
            super().logits(x, head, out)

    reference, folder = tiny
    decoder = load_decoder(folder, None, torch.float32, CPU)
    decoder.ops = NoEmptyProducts()
    engine = Bench(
        DecoderRunner(decoder, 64, 4),
        max_model_len=100,
        eos_token_ids=(),
        block_size=4,
        kv_tokens=256,
        max_step_tokens=16,
    )
    tokens = prompt(50)
    got = engine.run(submit("long", tokens, max_tokens=1))["long"]
    assert got == [int(expected(reference, tokens)[-1].argmax())]
    engine.close()


def test_float16_weights_lose_nothing_in_float32(tmp_path: Path) -> None:
    """Which "auto" takes for them."""
    folder = save(random_model().half(), tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    spec = load_spec(folder)
    assert spec.dtype == "float32"
    decoder = load_decoder(folder, None, getattr(torch, spec.dtype), CPU)
    tokens = prompt(100)
    assert_same(PagedModel(decoder).run({"a": tokens})["a"], expected(reference, tokens))

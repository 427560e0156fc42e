from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from replica.model.loading import load_decoder, load_spec, load_tokenizer
from replica.model.unsupported import UnsupportedModel
from tests.models import EOS_ID, random_model
from tests.replica.paged import PagedModel

CPU = torch.device("cpu")


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head from (half, index) to (index, half) order, as llama.cpp keeps them."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rotary_factors: list[float] | None = None,
    integers: str | None = None,
    whole: Mapping[str, Any] | None = None,
    **fields: Any,
) -> str:
    """The model as a GGUF file with additional fields of its architecture, or of its own.

    integers: a weight that is stored as int8.
    """
    config = model.config
    kind = config.model_type
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(EOS_ID)
    writer.add_eot_token_id(258)
    for name, value in {
        **{f"{kind}.{name}": fields[name] for name in fields},
        **(whole or {}),
    }.items():
        _add(writer, name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        projection = name.split(".")[-2]
        if kind == "llama" and projection in heads:
            values = interleaved(values, heads[projection])
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name == integers:
            writer.add_tensor(stored, values.astype(np.int8))
        elif values.ndim == 1:
            writer.add_tensor(stored, values)
        else:
            packed = gguf.quantize(values, quantization)
            writer.add_tensor(stored, packed, raw_dtype=quantization)
    if rotary_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rotary_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    """In place of what the writer has under that name already."""
    for fields in writer.kv_data:
        fields.pop(name, None)
    adders = {
        bool: writer.add_bool,
        str: writer.add_string,
        float: writer.add_float32,
        list: writer.add_array,
        int: writer.add_uint32,
    }
    adders[type(value)](name, value)


def logits(path: str) -> torch.Tensor:
    decoder = load_decoder(path, None, torch.float32, CPU)
    return PagedModel(decoder).run({"a": list(range(60))})["a"]


@torch.no_grad()
def expected(model: PreTrainedModel) -> torch.Tensor:
    result: torch.Tensor = model(torch.arange(60)[None]).logits[0]
    return result


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_is_the_model_that_was_written(tmp_path: Path, family: str, tied: bool) -> None:
    model = random_model(family, tie_word_embeddings=tied)
    path = write(tmp_path / "model.gguf", model)
    spec = load_spec(path)
    assert (spec.model_type, spec.tied_embeddings) == (family, tied)
    assert spec.eos_token_ids == (EOS_ID, 258)
    torch.testing.assert_close(logits(path), expected(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "error"), [("F16", 5e-4), ("BF16", 5e-3), ("Q8_0", 5e-3), ("Q4_0", 0.15)]
)
def test_weights_are_dequantised(tmp_path: Path, name: str, error: float) -> None:
    """Error of the weights as they were stored, relative to the largest."""
    model = random_model(hidden_size=64, intermediate_size=96)
    path = write(tmp_path / "model.gguf", model, quantization=gguf.GGMLQuantizationType[name])
    embedding = load_decoder(path, None, torch.float32, CPU).embedding
    original = model.get_input_embeddings().weight
    worst = (embedding - original).abs().max() / original.abs().max()
    assert 0 < worst < error


def test_rotary_factors_in_the_file_stretch_the_frequencies(tmp_path: Path) -> None:
    model = random_model()
    plain = load_spec(write(tmp_path / "plain.gguf", model)).layers[0].frequencies
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 4.0, 8.0, 8.0]
    path = write(tmp_path / "stretched.gguf", model, rotary_factors=factors)
    stretched = load_spec(path).layers[0].frequencies
    assert stretched == tuple(f / d for f, d in zip(plain, factors, strict=True))
    assert not torch.allclose(logits(path), expected(model), atol=1e-2)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def refusal(path: Path | str) -> str:
    """What loading the file is refused with: one sentence."""
    with pytest.raises(UnsupportedModel) as refused:
        load_decoder(str(path), None, torch.float32, CPU)
    message = str(refused.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope.dimension_count", 8),
        ("attention.value_length", 8),
        ("attention.scale", 0.5),
        ("logit_scale", 0.1),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.22),
        ("attention.clamp_kqv", 8.0),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention.causal", False),
        ("expert_count", 8),
        ("rope.scaling.attn_factor", 1.2),
        ("rope.dimension_sections", [16, 24, 24, 0]),
        ("attention.head_count_kv", [2, 1]),
        ("feed_forward_length", [96, 64]),
        ("attention.temperature_scale", 0.1),
        ("no_such_option", 0),
        ("no_such.option", "x"),
    ],
)
def test_an_option_that_is_not_computed_is_refused_by_name(
    path: Path, model: PreTrainedModel, name: str, value: Any
) -> None:
    assert name in refusal(write(path, model, **{name: value}))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope.dimension_count": 16, "attention.value_length": 16, "attention.scale": 0.25},
        {"logit_scale": 1.0, "expert_count": 0, "attention.causal": True},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        {"rope.scaling.factor": 0.0, "rope.scaling.finetuned": True},
        {"rope.scaling.original_context_length": 512, "vocab_size": 260},
        {"attention.sliding_window": 512},
        {"attention.sliding_window": 0},
    ],
    ids=str,
)
def test_an_option_that_changes_nothing_is_passed_over(
    path: Path, model: PreTrainedModel, fields: dict[str, Any]
) -> None:
    plain = load_spec(write(path.with_name("plain.gguf"), model))
    assert load_spec(write(path, model, **fields)) == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ],
    ids=str,
)
def test_a_factor_scales_linearly_where_no_type_is_named(
    path: Path, fields: dict[str, Any]
) -> None:
    """As llama.cpp has it; the reference is a configuration that says so."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    scaled = random_model(rope_parameters=rope)
    torch.testing.assert_close(
        logits(write(path, scaled, **fields)), expected(scaled), rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(logits(write(path, scaled)), expected(scaled), atol=1e-2)


def test_what_cannot_be_computed_is_refused(path: Path, model: PreTrainedModel) -> None:
    for kind in ("yarn", "longrope", "dynamic"):
        told = refusal(write(path, model, **{"rope.scaling.type": kind}))
        assert f"rope.scaling.type ({kind!r})" in told
    assert "sliding_window (128)" in refusal(
        write(path, model, **{"attention.sliding_window": 128})
    )
    for factors in ([1.0] * 7, [0.0] * 8, [float("nan")] * 8):
        assert "rope_freqs.weight" in refusal(write(path, model, rotary_factors=factors))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("general.type", "adapter"),
        ("split.count", 3),
        ("tokenizer.ggml.remove_extra_whitespaces", True),
        ("tokenizer.ggml.pre", "no-such-split"),
    ],
)
def test_an_option_of_the_whole_file_is_refused_by_name(
    path: Path, model: PreTrainedModel, name: str, value: Any
) -> None:
    told = refusal(write(path, model, whole={"tokenizer.ggml.model": "gpt2", name: value}))
    assert name in told
    assert repr(value) in told


def test_a_tokenizer_that_does_not_say_how_it_splits_is_warned_of(
    path: Path, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    load_spec(write(path, model, whole={"tokenizer.ggml.model": "gpt2"}))
    assert "tokenizer.ggml.pre" in caplog.text
    caplog.clear()
    known = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    load_spec(write(path, model, whole=known))
    assert not caplog.records


def test_ends_of_text_beyond_the_vocabulary_are_dropped_with_a_warning(
    path: Path, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """That of a message which calls a tool is one, too."""
    more = {"tokenizer.ggml.eom_token_id": 257}
    assert load_spec(write(path, model, whole=more)).eos_token_ids == (EOS_ID, 257, 258)
    odd = {"tokenizer.ggml.eom_token_id": 2**32 - 1}
    assert load_spec(write(path, model, whole=odd)).eos_token_ids == (EOS_ID, 258)
    assert str(2**32 - 1) in caplog.text


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.005, 0.05, 0.5, 0.99])
def test_a_file_that_is_cut_is_named(path: Path, model: PreTrainedModel, share: float) -> None:
    data = Path(write(path, model)).read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert str(path) in refusal(path)


def test_a_pointer_to_a_file_is_named(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    told = refusal(path)
    assert str(path) in told
    assert "Git LFS pointer" in told


def test_scales_that_are_not_finite_are_refused(path: Path, model: PreTrainedModel) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    data = bytearray(Path(write(path, model, quantization=kind)).read_bytes())
    [tensor] = [
        each for each in gguf.GGUFReader(path).tensors if each.name == "blk.1.ffn_up.weight"
    ]
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7e"  # NaN of float16
    path.write_bytes(data)
    told = refusal(path)
    assert "not finite" in told
    assert str(path) in told


def test_integers_are_no_weights(path: Path, model: PreTrainedModel) -> None:
    told = refusal(write(path, model, integers="model.layers.0.mlp.up_proj.weight"))
    assert f"'blk.0.ffn_up.weight' in {str(path)!r} is of the type I8" in told


@pytest.mark.parametrize("kind", ["bert", "phi3", "gemma3", "mistral3"])
def test_other_architectures_are_refused(tmp_path: Path, kind: str) -> None:
    """Those, too, whose checkpoints of transformers are served."""
    writer = gguf.GGUFWriter(str(tmp_path / "other.gguf"), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=f"Model type {kind!r} is not supported in a GGUF"):
        load_spec(str(tmp_path / "other.gguf"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("not a model" * 10)
    with pytest.raises(UnsupportedModel, match="is not a readable GGUF file"):
        load_spec(str(path))


def test_the_missing_reader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", random_model())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModel, match="run `pip install gguf`"):
        load_spec(path)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_a_tokenizer_adds_what_the_file_says(
    path: Path, model: PreTrainedModel, bos: bool, eos: bool
) -> None:
    letters = [chr(code) for code in range(33, 127)]
    tokens = [*letters, "ab", "<s>", "</s>"]
    first, last = len(tokens) - 2, len(tokens) - 1
    whole = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * first + [3, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": last,
        "tokenizer.ggml.add_bos_token": bos,
        "tokenizer.ggml.add_eos_token": eos,
    }
    tokenizer = load_tokenizer(write(path, model, whole=whole))
    ids = tokenizer.backend_tokenizer.encode("abc").ids
    text = [tokens.index("ab"), tokens.index("c")]
    assert ids == [first] * bos + text + [last] * eos

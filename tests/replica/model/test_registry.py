from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from replica.model.loading import load_spec
from replica.model.registry import FAMILIES
from tests.families import VARIANTS
from tests.models import EOS_ID, VOCAB_SIZE, byte_tokenizer, save_tiny
from tests.replica.checkpoints import edit, load, refusal


def test_a_spec_says_what_the_configuration_says(tiny: str) -> None:
    spec = load_spec(tiny)
    assert (spec.model_type, spec.vocab_size, spec.max_position) == ("llama", VOCAB_SIZE, 512)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert not spec.tied_embeddings


def test_eos_ids_come_from_all_three_places(tiny: str) -> None:
    """C07: the tokenizer's, the configuration's and those for generation."""
    edit(tiny, eos_token_id=[3, 4])
    GenerationConfig(eos_token_id=[4, 5]).save_pretrained(tiny)
    assert load_spec(tiny).eos_token_ids == (3, 4, 5, EOS_ID)


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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gemma3"}, "Model type 'gemma3' is not supported"),
        ({"model_type": ["llama"]}, "Model type ['llama'] is not supported"),
        ({"model_type": "no_such_model"}, "Model type 'no_such_model' is not supported"),
        ({"hidden_act": "gelu"}, "Activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "'proportional'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 4.0}}, "no finite"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": "4"}}, "factor"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "short_factor": [1.0] * 7,
                    "long_factor": [1.0] * 8,
                }
            },
            "8 numbers as its short_factor",
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
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer"),
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
    "_sliding_window_pattern", "attention_bias", "attn_logit_softcapping", "bos_token_id",
    "eos_token_id",
    "final_logit_softcapping", "head_dim", "hidden_act", "hidden_activation", "hidden_size",
    "intermediate_size", "layer_types", "max_position_embeddings", "max_window_layers", "mlp_bias",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "original_max_position_embeddings", "query_pre_attn_scalar", "rms_norm_eps", "rope_parameters",
    "sliding_window", "tie_word_embeddings", "use_bidirectional_attention", "use_sliding_window",
    "vocab_size",
}  # fmt: skip
OF_TRAINING = {
    "attention_dropout", "embd_pdrop", "initializer_range", "pretraining_tp", "resid_pdrop",
}  # fmt: skip
OF_GENERATION = {"pad_token_id", "use_cache"}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_has_no_option_for_a_family_that_nobody_has_looked_at(family: str) -> None:
    """A version that adds one may compute something that we do not."""
    known = set(PreTrainedConfig().to_dict()) | HANDLED | OF_TRAINING | OF_GENERATION
    assert set(AutoConfig.for_model(family).to_dict()) <= known


def test_every_family_is_proven() -> None:
    assert {family for family, _ in VARIANTS.values()} == set(FAMILIES)


def test_options_that_change_nothing_are_passed_over(tiny: str) -> None:
    edit(tiny, rope_interleaved=False, logits_scaling=1.0, attn_logit_softcapping=None)
    edit(tiny, pretraining_tp=4, attention_dropout=0.1, unsloth_fixed=True, hidden_act="swish")
    assert load(tiny)


def test_windows_are_those_of_the_layers_that_have_one(tmp_path: Path) -> None:
    def windows(name: str, family: str, **options: Any) -> list[int | None]:
        folder = save_tiny(tmp_path / name, family, **options)
        return [layer.window for layer in load_spec(folder).layers]

    assert windows("all", "mistral", sliding_window=128) == [128, 128]
    assert windows("wide", "mistral", sliding_window=512) == [None, None]
    some = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    assert windows("some", "qwen3", **some) == [None, 64]
    assert windows("unused", "qwen3", sliding_window=64) == [None, None]


def test_layers_that_differ_are_refused_where_transformers_would_not_see_it(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "phi3", sliding_window=128)
    kinds = ["full_attention", "sliding_attention"]
    assert "layer_types is not supported for 'phi3'" in refusal(edit(folder, layer_types=kinds))
    assert "sliding_window" in refusal(edit(folder, layer_types=None, sliding_window="many"))


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float16", "float32"), ("bfloat16", "bfloat16"), (None, "float32")]
)
def test_the_type_that_loses_nothing_is_known(tiny: str, stored: str | None, dtype: str) -> None:
    assert load_spec(edit(tiny, dtype=stored)).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping (50.0)"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping must be a positive number"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a positive number"),
        ({"hidden_activation": "gelu"}, "Activation 'gelu'"),
    ],
    ids=str,
)
def test_what_gemma_3_does_not_compute_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    """Scores have no soft cap in transformers, whatever the configuration says."""
    family, options = VARIANTS["gemma3"]
    assert reason in refusal(edit(save_tiny(tmp_path, family, **options), **changes))


SHAPE = {"num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 300}
PUBLISHED: dict[str, tuple[dict[str, Any], list[int | None], int, float, str]] = {
    "Mistral 7B v0.1": (
        {
            "model_type": "mistral", "num_attention_heads": 32, "num_key_value_heads": 8,
            "hidden_size": 4096, "hidden_act": "silu", "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096,
            "torch_dtype": "bfloat16",
        },
        [4096] * 12, 32768, 128**-0.5, "bfloat16",
    ),
    "Llama 2 7B": (
        {
            "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 32,
            "hidden_size": 4096, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "pretraining_tp": 1, "rope_scaling": None, "torch_dtype": "float16",
        },
        [None] * 12, 4096, 128**-0.5, "float32",
    ),
    "Qwen2.5 with YaRN": (
        {
            "model_type": "qwen2", "num_attention_heads": 8, "num_key_value_heads": 4,
            "max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 131072,
            "use_sliding_window": False, "torch_dtype": "bfloat16",
            "rope_scaling": {
                "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn",
            },
        },
        [None] * 12, 131072, 8**-0.5 * (0.1 * math.log(4) + 1) ** 2, "bfloat16",
    ),
    "Phi-3 mini 4k": (
        {
            "model_type": "phi3", "num_attention_heads": 8, "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096, "rope_scaling": None,
            "sliding_window": 2047, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
            "torch_dtype": "bfloat16", "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        },
        [2047] * 12, 4096, 8**-0.5, "bfloat16",
    ),
    "Phi-3 mini 128k": (
        {
            "model_type": "phi3", "num_attention_heads": 8, "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096, "sliding_window": 262144,
            "rope_scaling": {
                "long_factor": [1.5] * 4, "short_factor": [1.0] * 4, "type": "longrope",
            },
            "torch_dtype": "bfloat16",
        },
        [None] * 12, 4096, 8**-0.5 * (1 + math.log(32) / math.log(4096)), "bfloat16",
    ),
    "Gemma 2 2B": (
        {
            "model_type": "gemma2", "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid",
            "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": 10000.0,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "torch_dtype": "float32",
        },
        [4096, None] * 6, 8192, 256**-0.5, "float32",
    ),
    "Gemma 3 1B": (
        {
            "model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 1,
            "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512,
            "cache_implementation": "hybrid", "max_position_embeddings": 32768,
            "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window_pattern": 6, "attn_logit_softcapping": None,
            "final_logit_softcapping": None, "torch_dtype": "bfloat16",
        },
        ([512] * 5 + [None]) * 2, 32768, 256**-0.5, "bfloat16",
    ),
}  # fmt: skip
"""Configurations as hubs have them, but for sizes; the windows by layer, the longest context, the
scale of scores and the type that "auto" is."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_as_they_are_published(tmp_path: Path, name: str) -> None:
    fields, windows, longest, scale, dtype = PUBLISHED[name]
    config = SHAPE | {"eos_token_id": 7} | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(tmp_path)
    spec = load_spec(str(tmp_path))
    assert [layer.window for layer in spec.layers] == windows
    assert (spec.max_position, spec.dtype) == (longest, dtype)
    assert [layer.scale for layer in spec.layers] == pytest.approx([scale] * 12)
    turns = {layer.window: layer.frequencies for layer in spec.layers}
    assert len(set(turns.values())) == (2 if name == "Gemma 3 1B" else 1)

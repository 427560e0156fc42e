"""Which models can be served exactly, and what their configuration means.

It knows transformers' configuration fields, and no file. A model gets in only if its family is
proven equal to transformers by a parity test, and each option that would change its arithmetic
is handled or refused by name: a wrong answer is worse than none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from replica.model.decoder import ModelSpec

logger = logging.getLogger(__name__)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MAX_EOS_IDS = 16
"""As many again remain to clients, of the stop ids that a sequence can have."""
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "compression_config": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "mlp_bias": (False,),
    "mup": (False,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "qk_layernorm": (False,),
    "quantization": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "scale_depth": (),
    "scale_emb": (1.0,),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
    "use_sinks": (False,),
}
"""Options that change the arithmetic, some of them of relatives of the families and passed over by
transformers; and the values, beside None, with which they do not."""
_ROTARY = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
}  # fmt: skip


class UnsupportedModel(ValueError):
    """A model that this engine cannot serve, and why, in one sentence."""


def check_family(model_type: str) -> None:
    """Raises UnsupportedModel unless the family is on the list."""
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(
            f"Model type {model_type!r} is not supported: only {known} are proven to give the "
            f"same results as transformers."
        )


def spec_from_config(config: Any, eos_token_ids: Iterable[Any]) -> ModelSpec:
    """The spec of a transformers configuration, or of any object with the same attributes.

    eos_token_ids: as files name them; what is no id of the vocabulary is left out. Raises
    UnsupportedModel on options that the decoder does not compute.
    """
    check_family(config.model_type)
    _check_options(config)
    _check_sizes(config)
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if type(head_dim) is not int or head_dim < 2 or head_dim % 2:
        raise UnsupportedModel(f"Heads of size {head_dim!r} are not supported, only even sizes.")
    return ModelSpec(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        max_position=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rotary_frequencies=rotary_frequencies(head_dim, config.rope_parameters),
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type == "qwen3",
        tied_embeddings=config.tie_word_embeddings,
        eos_token_ids=_eos_ids(eos_token_ids, config.vocab_size),
    )


def _eos_ids(found: Iterable[Any], vocab_size: int) -> tuple[int, ...]:
    """Those that a token can have: others are a common oddity, and would never be sampled."""
    named = list(found)
    ids = {token for token in named if type(token) is int and 0 <= token < vocab_size}
    odd = [token for token in named if type(token) is not int or token not in ids]
    if odd:
        logger.warning(
            "These ends of a text are no ids of the vocabulary, which has %d tokens, and count "
            "for nothing: %s",
            vocab_size,
            ", ".join(sorted({repr(token)[:100] for token in odd})),
        )
    if len(ids) > MAX_EOS_IDS:
        raise UnsupportedModel(
            f"The model has {len(ids)} end-of-sequence ids: at most {MAX_EOS_IDS} are supported."
        )
    return tuple(sorted(ids))


def _check_sizes(config: Any) -> None:
    for name in _SIZES:
        value = getattr(config, name, None)
        if type(value) is not int or value < 1:
            raise UnsupportedModel(f"The option {name} must be a positive number, not {value!r}.")
    eps = config.rms_norm_eps
    if type(eps) not in (int, float) or not 0 < eps < 1:
        raise UnsupportedModel(f"The option rms_norm_eps must lie between 0 and 1, not {eps!r}.")
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if heads % shared:
        raise UnsupportedModel(f"{heads} attention heads cannot share {shared} key-value heads.")


def _check_options(config: Any) -> None:
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModel(f"Activation {config.hidden_act!r} is not supported, only 'silu'.")
    for option, neutral in _NEUTRAL.items():
        value = getattr(config, option, None)
        if value is not None and value not in neutral:
            raise UnsupportedModel(f"The option {option} ({value!r:.100}) is not supported.")
    others = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if others:
        raise UnsupportedModel(f"Layers of type {min(others)!r} are not supported.")
    window = _sliding_window(config)
    if window is not None:
        raise UnsupportedModel(
            f"Sliding-window attention (over {window} tokens) is not supported, only full "
            f"attention."
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = dict(quantization).get("quant_method", "unknown")
        raise UnsupportedModel(
            f"Weights quantized by the method {method!r} are not supported, only plain "
            f"safetensors and GGUF."
        )


def _sliding_window(config: Any) -> int | None:
    """The window, if a sequence of this model can ever outgrow it."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is None or window >= config.max_position_embeddings:
        return None
    return window if "sliding_attention" in kinds else None


def rotary_frequencies(head_dim: int, parameters: Mapping[str, Any]) -> tuple[float, ...]:
    """[head_dim / 2] radians per position, computed in float32 as models were trained with.

    parameters: `rope_parameters` of a configuration. Raises UnsupportedModel on variants that
    are unknown, or that depend on anything else than a token's own position.
    """
    kind = parameters.get("rope_type", parameters.get("type"))
    unknown = sorted(name for name in parameters if name not in _ROTARY)
    if kind in ("dynamic", "longrope"):
        raise UnsupportedModel(
            f"Rotary scaling {kind!r} is not supported: it takes its frequencies from the longest "
            f"prompt of a batch, so one tenant's prompt would change another's answer."
        )
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(
            f"Rotary scaling {kind!r} is not supported, only default, linear and llama3."
        )
    if unknown:
        raise UnsupportedModel(f"The rotary option {unknown[0]!r} is not supported.")
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModel("Rotating only a part of each head is not supported.")
    _check_rotary_numbers(kind, parameters)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / parameters["rope_theta"] ** exponents
    if kind == "linear":
        frequencies = frequencies / parameters["factor"]
    if kind == "llama3":
        frequencies = _stretch(frequencies, parameters)
    if not frequencies.isfinite().all():
        raise UnsupportedModel(f"The numbers of rotary scaling {kind!r} give no finite angles.")
    return tuple(frequencies.tolist())


def _check_rotary_numbers(kind: str, parameters: Mapping[str, Any]) -> None:
    wanted = ["rope_theta"]
    if kind != "default":
        wanted.append("factor")
    if kind == "llama3":
        wanted += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    for name in wanted:
        value: Any = parameters.get(name)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise UnsupportedModel(
                f"Rotary scaling {kind!r} needs a positive {name}, not {value!r:.100}."
            )


def _stretch(frequencies: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: slow rotations by `factor` slower, quick ones unchanged, smooth in between."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    quick = ((turns - low) / (high - low)).clamp(0, 1)
    stretched: Tensor = (1 - quick) * frequencies / parameters["factor"] + quick * frequencies
    return stretched

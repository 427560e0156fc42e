"""Which models can be served exactly, and what their configuration means.

It knows transformers' configuration fields, and no file. A model gets in only if its family is
proven equal to transformers by a parity test, and each option that would change its arithmetic
is handled or refused by name: a wrong answer is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from replica.model import ModelSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


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


def spec_from_config(config: Any, eos_token_ids: Collection[int]) -> ModelSpec:
    """The spec of a transformers configuration, or of any object with the same attributes.

    Raises UnsupportedModel on options that the decoder does not compute.
    """
    check_family(config.model_type)
    _check_options(config)
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
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
        eos_token_ids=tuple(sorted(eos_token_ids)),
    )


def _check_options(config: Any) -> None:
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"Activation {config.hidden_act!r} is not supported, only 'silu'.")
    for option in ("attention_bias", "mlp_bias"):
        if getattr(config, option, False):
            raise UnsupportedModel(f"The option {option} is not supported.")
    window = _sliding_window(config)
    if window is not None:
        raise UnsupportedModel(
            f"Sliding-window attention (over {window} tokens) is not supported, only full "
            f"attention."
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method", "unknown")
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
    kind = parameters["rope_type"]
    if kind in ("dynamic", "longrope"):
        raise UnsupportedModel(
            f"Rotary scaling {kind!r} is not supported: it takes its frequencies from the longest "
            f"prompt of a batch, so one tenant's prompt would change another's answer."
        )
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(
            f"Rotary scaling {kind!r} is not supported, only default, linear and llama3."
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("Rotating only a part of each head is not supported.")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / parameters["rope_theta"] ** exponents
    if kind == "linear":
        frequencies = frequencies / parameters["factor"]
    if kind == "llama3":
        frequencies = _stretch(frequencies, parameters)
    return tuple(frequencies.tolist())


def _stretch(frequencies: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: slow rotations by `factor` slower, quick ones unchanged, smooth in between."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    quick = ((turns - low) / (high - low)).clamp(0, 1)
    stretched: Tensor = (1 - quick) * frequencies / parameters["factor"] + quick * frequencies
    return stretched

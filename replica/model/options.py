"""Which options of a configuration are understood, and which values make sense.

It knows transformers' names. An option that would change the arithmetic is computed or refused by
name: a wrong answer is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replica.model.spec import Activation
from replica.model.unsupported import UnsupportedModel

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
"""Options that change the arithmetic (some belong to related families, and transformers ignores
them), with the values that, beside None, leave it as it is."""
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
FULL, SLIDING = "full_attention", "sliding_attention"


def check_options(config: Any, computed: frozenset[str]) -> None:
    """computed: the options that this model's family has. Raises UnsupportedModel."""
    for option, neutral in _NEUTRAL.items():
        value = getattr(config, option, None)
        if option not in computed and value is not None and value not in neutral:
            raise UnsupportedModel(f"The option {option} ({value!r:.100}) is not supported.")
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = dict(quantization).get("quant_method", "unknown")
        raise UnsupportedModel(
            f"Weights quantized by the method {method!r} are not supported, only plain "
            f"safetensors and GGUF."
        )


def check_sizes(config: Any) -> None:
    """Raises UnsupportedModel."""
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


def head_dim(config: Any) -> int:
    """Raises UnsupportedModel on sizes that are not even."""
    size = getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    if type(size) is not int or size < 2 or size % 2:
        raise UnsupportedModel(f"Heads of size {size!r} are not supported, only even sizes.")
    return size


def activation(config: Any, option: str) -> Activation:
    """option: the name of the one that says it. Raises UnsupportedModel."""
    name = getattr(config, option, None)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(map(repr, _ACTIVATIONS))
        raise UnsupportedModel(f"Activation {name!r} is not supported, only {known}.")
    return _ACTIVATIONS[name]


def positive(config: Any, option: str | None) -> float | None:
    """What an option says, None if it says nothing. Raises UnsupportedModel."""
    value = None if option is None else getattr(config, option, None)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise UnsupportedModel(f"The option {option} must be a positive number, not {value!r}.")
    return float(value)


def flag_or_number(config: Any, option: str) -> Any:
    """As `positive`, but for an option that may be a flag."""
    value = getattr(config, option, None)
    return value if isinstance(value, bool) else positive(config, option)


def layer_kinds(config: Any, *, by_layer: bool) -> list[str]:
    """FULL or SLIDING, of each layer. by_layer: whether they may differ in this family. Raises
    UnsupportedModel."""
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    every = FULL if window is None else SLIDING
    kinds = list(getattr(config, "layer_types", None) or [every] * count)
    others = {str(kind) for kind in kinds} - {FULL, SLIDING}
    if others:
        raise UnsupportedModel(f"Layers of type {min(others)!r} are not supported.")
    if len(kinds) != count:
        raise UnsupportedModel(f"layer_types names {len(kinds)} of {count} layers.")
    if not by_layer and len(set(kinds)) > 1:
        raise UnsupportedModel(
            f"The option layer_types is not supported for {config.model_type!r}: all layers attend "
            f"alike."
        )
    if SLIDING in kinds and (type(window) is not int or window < 1):
        raise UnsupportedModel(
            f"The option sliding_window must be a positive number, not {window!r}."
        )
    return kinds

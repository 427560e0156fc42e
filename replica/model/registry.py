"""The registry of model families, and what a configuration means: config class -> spec -> block.

A model gets in only if its family is proven equal to transformers by a parity test. It knows
transformers' configurations, and no file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from replica.model import gemma, llama
from replica.model.block import Block
from replica.model.family import Family
from replica.model.options import (
    SLIDING,
    activation,
    check_options,
    check_sizes,
    flag_or_number,
    head_dim,
    layer_kinds,
    positive,
)
from replica.model.rope_scaling import Rotary, rotary
from replica.model.spec import DTypeName, LayerSpec, ModelSpec
from replica.model.unsupported import UnsupportedModel

logger = logging.getLogger(__name__)

FAMILIES: Mapping[str, Family] = {**llama.FAMILIES, **gemma.FAMILIES}
MAX_EOS_IDS = 16
"""Half of the stop ids that a sequence can have: the other half is for clients."""


def check_family(model_type: Any) -> None:
    """Raises UnsupportedModel unless the family is on the list."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(
            f"Model type {model_type!r} is not supported: only {known} are proven to give the "
            f"same results as transformers."
        )


def block_class(model_type: str) -> type[Block]:
    return FAMILIES[model_type].block


def spec_from_config(config: Any, eos_token_ids: Iterable[Any]) -> ModelSpec:
    """The spec of a transformers configuration, or of any object with the same attributes.

    eos_token_ids: as files name them; what is no id of the vocabulary is left out. Raises
    UnsupportedModel on options that the decoder does not compute.
    """
    check_family(config.model_type)
    family = FAMILIES[config.model_type]
    check_options(config, family.options)
    check_sizes(config)
    kinds = layer_kinds(config, by_layer=family.windows == "by layer")
    turns = {kind: _rotary(config, family, kind) for kind in dict.fromkeys(kinds)}
    layers = {kind: _layer(config, family, kind, turn) for kind, turn in turns.items()}
    read = {field: flag_or_number(config, option) for field, option in family.reads.items()}
    return ModelSpec(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        layers=tuple(layers[kind] for kind in kinds),
        max_position=_max_position(config, turns.values()),
        norm_eps=config.rms_norm_eps,
        embedding_scale=config.hidden_size**0.5 if family.scales_embedding else 1.0,
        tied_embeddings=config.tie_word_embeddings,
        eos_token_ids=_eos_ids(eos_token_ids, config.vocab_size),
        dtype=_dtype(config),
        **{field: value for field, value in read.items() if value is not None},
        **family.has,
    )


def _layer(config: Any, family: Family, kind: str, turn: Rotary) -> LayerSpec:
    window: int | None = None
    if kind == SLIDING and config.sliding_window < turn.max_position:
        window = config.sliding_window
    if window is not None and family.windows == "none":
        raise UnsupportedModel(
            f"Sliding-window attention (over {window} tokens) is not supported for "
            f"{config.model_type!r}, only full attention."
        )
    scaled = positive(config, family.query_scalar) or head_dim(config)
    return LayerSpec(
        frequencies=turn.frequencies,
        scale=scaled**-0.5 * turn.magnitude**2,
        window=window,
        soft_cap=positive(config, family.soft_cap),
        activation=activation(config, family.activation),
    )


def _rotary(config: Any, family: Family, kind: str) -> Rotary:
    """Of layers of that kind."""
    parameters = config.rope_parameters
    if family.turns_by_layer and isinstance(parameters, Mapping):
        parameters = parameters.get(kind)
    return rotary(head_dim(config), parameters, config.max_position_embeddings)


def _max_position(config: Any, turns: Iterable[Rotary]) -> int:
    longest = min(turn.max_position for turn in turns)
    if longest < config.max_position_embeddings:
        logger.warning(
            "Contexts of up to %d tokens are served, of %d: rotary angles of longer sequences "
            "depend on their lengths",
            longest,
            config.max_position_embeddings,
        )
    return longest


def _dtype(config: Any) -> DTypeName:
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return "bfloat16" if stored == "bfloat16" else "float32"


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

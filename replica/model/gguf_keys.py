"""Which metadata of a GGUF file are understood.

Under the name of its architecture a file says how the model computes. What is read there, and what
changes no answer, is listed here; anything else is refused by name, since a key that nobody looks
at may be the one that matters. The module knows names and values, and no file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from replica.model.unsupported import UnsupportedModel

logger = logging.getLogger(__name__)

READ = frozenset({
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.scale",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.type",
})  # fmt: skip
"""Keys that `GGUFFile` reads."""
HARMLESS = frozenset({
    "attention.layer_norm_epsilon",  # of another kind of norm
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",  # this and the following: of scalings that are refused
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
    "tensor_data_layout",
    "vocab_size",  # the embedding says it
})  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "use_parallel_residual": (False,),
}
"""Keys that may be there with these values, which change nothing."""
OF_THE_FILE: Mapping[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "split.count": (0, 1),
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.normalizer.lowercase": (False,),
    "tokenizer.ggml.normalizer.strip_accents": (False,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
}
"""The same for keys that do not belong to the architecture."""
_SPLITS = frozenset({
    "dbrx", "deepseek-r1-qwen", "exaone", "falcon3", "gpt-2", "gpt-4o", "jais", "kormo",
    "llama-bpe", "llama-v3", "llama3", "llama4", "megrez", "mpt", "olmo", "phi-2", "pixtral",
    "qwen2", "qwen35", "refact", "smaug-bpe", "smollm", "starcoder", "tekken",
})  # fmt: skip
"""Byte-level pre-tokenizers that split text as transformers does."""


def check_keys(fields: Mapping[str, Any], architecture: str) -> None:
    """fields: all of a file, by name. Raises UnsupportedModel for one that the engine would have
    to follow and does not."""
    own = f"{architecture}."
    for name in fields:
        key = name.removeprefix(own) if name.startswith(own) else None
        neutral = OF_THE_FILE.get(name) if key is None else NEUTRAL.get(key)
        known = key is None or key in READ or key in HARMLESS
        if not (known if neutral is None else fields[name] in neutral):
            raise UnsupportedModel(
                f"The GGUF option {name} ({fields[name]!r:.100}) is not supported."
            )
    if fields.get("tokenizer.ggml.model") == "gpt2":
        _check_split(fields.get("tokenizer.ggml.pre"))


def _check_split(split: Any) -> None:
    if split in (None, "default"):
        logger.warning(
            "The GGUF file does not say how its tokenizer splits text (tokenizer.ggml.pre): GPT-2's"
            " way is taken, and answers may be worse than the model's own. A newer file says it"
        )
    elif split not in _SPLITS:
        raise UnsupportedModel(f"The GGUF option tokenizer.ggml.pre ({split!r}) is not supported.")

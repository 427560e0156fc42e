"""What is proven equal to transformers: every family, in every way that changes its arithmetic."""

from __future__ import annotations

from typing import Any

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0],
    "long_factor": [2.0] * 8,
}
KINDS = ["full_attention", "sliding_attention"]
WINDOWS = {"use_sliding_window": True, "sliding_window": 12, "num_hidden_layers": 3}
LINEAR_SCALING = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
}
GEMMA = {
    "num_hidden_layers": 3,
    "sliding_window": 13,
    "layer_types": [KINDS[1], *KINDS],
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-sharing": ("llama", {"num_key_value_heads": 4}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama3-scaling": ("llama", {"rope_parameters": LLAMA3_SCALING}),
    "linear-scaling": ("llama", {"rope_parameters": LINEAR_SCALING}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "yarn-qk-norm": ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "dynamic": ("llama", {"rope_parameters": LINEAR_SCALING | {"rope_type": "dynamic"}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "phi3": ("phi3", {}),
    "phi3-longrope-window": (
        "phi3",
        {
            "sliding_window": 30,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 256,
        },
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen2-windows": ("qwen2", WINDOWS | {"layer_types": [*KINDS, KINDS[1]]}),
    "gemma2": ("gemma2", GEMMA),
    "gemma2-caps": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": ("gemma3_text", GEMMA | {"rope_parameters": BY_LAYER, "head_dim": 32}),
    "gemma3-cap-biases": (
        "gemma3_text",
        GEMMA | {"final_logit_softcapping": 4.0, "attention_bias": True},
    ),
    "ministral": ("ministral", {"sliding_window": 11, "layer_types": KINDS}),
    "qwen3-windows": ("qwen3", WINDOWS | {"layer_types": [KINDS[1], *KINDS]}),
}

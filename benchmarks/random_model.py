"""A model of a given shape with random weights, in a folder, for a server to load."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.workload import MODEL
from replica.loading import load_tokenizer
from replica.model import ModelSpec


def save(spec: ModelSpec, folder: Path, dtype: torch.dtype, device: str) -> None:
    """Of the Llama family, with SmolLM2's tokenizer and so its vocabulary. The weights are made on
    `device`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = load_tokenizer(MODEL)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied_embeddings,
        dtype=dtype,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

"""A model of a given shape with random weights, in a folder, for a server to load.

`python -m benchmarks.random_model SHAPE FOLDER DEVICE TOKENIZER`, in a process of its own, so that
no memory of the device stays taken.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.shapes import SHAPES
from replica.loading import load_tokenizer


def main() -> None:
    """Of the Llama family in bfloat16, with the vocabulary of the tokenizer of that model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, folder, device, tokenizer_of = sys.argv[1:]
    spec, tokenizer = SHAPES[shape], load_tokenizer(tokenizer_of)
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
        dtype=torch.bfloat16,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()

"""A model of a given shape with random weights, in a folder, for a server to load.

`python -m benchmarks.random_model SHAPE FOLDER DEVICE TOKENIZER`, in a process of its own, so that
no memory of the device stays taken.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.shapes import SHAPES
from replica.model.loading import load_tokenizer
from replica.model.spec import ModelSpec


def configuration(spec: ModelSpec, **options: Any) -> Any:
    """Of a model of that shape in transformers; `options` override it."""
    from transformers import AutoConfig

    shape = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": spec.tied_embeddings,
    }
    return AutoConfig.for_model(spec.model_type, **(shape | options))


def main() -> None:
    """In bfloat16, with the vocabulary of the tokenizer of that model."""
    from transformers import AutoModelForCausalLM

    shape, folder, device, tokenizer_of = sys.argv[1:]
    tokenizer = load_tokenizer(tokenizer_of)
    config = configuration(SHAPES[shape], vocab_size=len(tokenizer))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()

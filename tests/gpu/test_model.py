"""Logits on a GPU beside transformers' own, in both dtypes."""

from __future__ import annotations

import pytest
import torch

from replica.model.attention.backends import paged_attention
from replica.model.attention.metadata import AttentionMetadata
from replica.model.loading import load_decoder
from tests.families import VARIANTS
from tests.models import save_tiny

LENGTH = 300
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
}


def logits_of(decoder, device, tokens: torch.Tensor) -> torch.Tensor:
    """All positions, as one prompt chunk."""
    count, ints = len(tokens), {"dtype": torch.int32, "device": device.memory}
    blocks = -(-count // 16)
    dtype = decoder.embedding.dtype
    _, attention = paged_attention(decoder.spec, blocks, 16, dtype, device.memory)
    positions = torch.arange(count, device=device.memory)
    attend = attention.bind(
        AttentionMetadata(
            query_lens=[count],
            context_lens=[count],
            block_tables=torch.arange(blocks, **ints)[None],
            slot_mapping=positions,
            query_starts=torch.tensor([0, count], **ints),
            device_context_lens=torch.tensor([count], **ints),
        )
    )
    logits = torch.empty(count, decoder.spec.vocab_size, device=device.memory)
    decoder(tokens, positions, attend, positions, logits)
    return logits


@pytest.mark.parametrize(
    "variant",
    [
        "llama", "llama-biases", "mistral-window", "qwen2", "qwen3", "qwen3-windows", "phi3",
        "gemma2-caps", "gemma3", "gemma3-cap-biases",
    ],
)  # fmt: skip
def test_logits_are_those_of_transformers(variant, device, tmp_path):
    """fp32: relative error below 1e-5. bf16: below 3e-2, and at most a tenth above what
    transformers' own bf16 forward is off from its fp32 forward."""
    from transformers import AutoModelForCausalLM

    family, options = VARIANTS[variant]
    options = options | WIDE
    if "layer_types" in options:
        options["layer_types"] = ["sliding_attention", "full_attention"] * 2
    folder = save_tiny(tmp_path, family, **options)
    tokens = torch.randint(256, (LENGTH,), device=device.memory)
    theirs, ours = {}, {}
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager"
            )
            theirs[dtype] = model.to(device.memory)(tokens[None]).logits[0].double()
            decoder = load_decoder(folder, None, dtype, device.memory)
            ours[dtype] = logits_of(decoder, device, tokens).double()
    exact = theirs[torch.float32]

    def error(logits: torch.Tensor) -> float:
        return float((logits - exact).norm() / exact.norm())

    assert error(ours[torch.float32]) < 1e-5
    assert error(ours[torch.bfloat16]) < 3e-2
    assert error(ours[torch.bfloat16]) < 1.1 * error(theirs[torch.bfloat16])

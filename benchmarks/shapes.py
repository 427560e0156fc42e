"""Model shapes by name, with random weights made on the device: speed depends on no value."""

from __future__ import annotations

import torch

from replica.families import rotary_frequencies
from replica.model import Decoder, ModelSpec


def _llama(hidden: int, intermediate: int, layers: int, head_dim: int, *, tied: bool) -> ModelSpec:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    return ModelSpec(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        max_position=131_072,
        norm_eps=1e-5,
        rotary_frequencies=rotary_frequencies(head_dim, rope),
        tied_embeddings=tied,
    )


SHAPES = {
    "llama-1b": _llama(2048, 8192, 16, 64, tied=True),
    "llama-8b": _llama(4096, 14_336, 32, 128, tied=False),
}


def random_decoder(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Norms scale by 1, all other weights are small and normal."""
    decoder = Decoder(spec, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    return decoder

"""Model shapes by name, with random weights made on the device: speed depends on no value."""

from __future__ import annotations

from dataclasses import replace

import torch

from replica.model.decoder import Decoder
from replica.model.rope_scaling import rotary
from replica.model.spec import LayerSpec, ModelSpec


def _llama(hidden: int, intermediate: int, layers: int, head_dim: int, *, tied: bool) -> ModelSpec:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    frequencies = rotary(head_dim, rope, 1).frequencies
    return ModelSpec(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        max_position=131_072,
        norm_eps=1e-5,
        layers=(LayerSpec(frequencies=frequencies, scale=head_dim**-0.5),) * layers,
        tied_embeddings=tied,
    )


def _gemma3_1b() -> ModelSpec:
    """Five layers that see 512 keys, then one that sees all."""
    near = rotary(256, {"rope_type": "default", "rope_theta": 10_000.0}, 1).frequencies
    far = rotary(256, {"rope_type": "default", "rope_theta": 1_000_000.0}, 1).frequencies
    common = LayerSpec(frequencies=far, scale=256**-0.5, activation="gelu_tanh")
    windowed = replace(common, frequencies=near, window=512)
    return ModelSpec(
        model_type="gemma3_text",
        vocab_size=262_144,
        hidden_size=1152,
        intermediate_size=6912,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        max_position=32_768,
        norm_eps=1e-6,
        layers=tuple(windowed if (i + 1) % 6 else common for i in range(26)),
        qk_norm=True,
        embedding_scale=1152**0.5,
        tied_embeddings=True,
    )


SHAPES = {
    "small": _llama(64, 128, 2, 16, tied=True),
    "llama-1b": _llama(2048, 8192, 16, 64, tied=True),
    "llama-8b": _llama(4096, 14_336, 32, 128, tied=False),
    "gemma3-1b": _gemma3_1b(),
    "qwen3-8b": replace(
        _llama(4096, 12_288, 36, 128, tied=False),
        model_type="qwen3",
        vocab_size=151_936,
        qk_norm=True,
        max_position=40_960,
    ),
}
BANDWIDTH = 4.8e12
"""Bytes per second of an H200's memory, by its datasheet."""


def floor_ms(spec: ModelSpec, rows: int, context: int) -> float:
    """What a bfloat16 decode step takes to read, at that speed: the weights, but not the
    embedding, in which it only looks rows up, and the contexts' keys and values."""
    head = spec.head_dim
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * head * spec.hidden_size
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    weights = spec.num_layers * (attention + mlp) + spec.vocab_size * spec.hidden_size
    kv = 2 * spec.num_layers * spec.num_kv_heads * head * rows * context
    return 2 * (weights + kv) / BANDWIDTH * 1e3


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

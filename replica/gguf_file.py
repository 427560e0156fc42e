"""Reads a llama.cpp model file: its configuration, and its weights, dequantised one by one.

It knows the names and conventions of GGUF, and gives them transformers' meaning. transformers
reads such files too, but parses the metadata anew for each question and finds names by search,
which takes several times as long as the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replica.families import UnsupportedModel, check_family, spec_from_config
from replica.model import ModelSpec

_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTARY_FACTORS = "rope_freqs.weight"


class GGUFFile:
    """A checkpoint in one file. Raises UnsupportedModel if the gguf package is missing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._reader = _reader(path)
        self._architecture: str = self._field("general.architecture")
        check_family(self._architecture)

    def spec(self) -> ModelSpec:
        """Raises UnsupportedModel on models that cannot be served exactly."""
        eos = (self._field(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot"))
        spec = spec_from_config(self._config(), {token for token in eos if token is not None})
        for tensor in self._reader.tensors:
            if tensor.name == _ROTARY_FACTORS:
                # How llama.cpp writes Llama 3.1's context scaling.
                divisors = _dequantized(tensor).tolist()
                pairs = zip(spec.rotary_frequencies, divisors, strict=True)
                return replace(spec, rotary_frequencies=tuple(f / d for f, d in pairs))
        return spec

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under transformers' names, float32 or as they were stored."""
        heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
        for stored in self._reader.tensors:
            if stored.name == _ROTARY_FACTORS:
                continue
            tensor = _dequantized(stored)
            kind = stored.name.split(".")[-2]
            if self._architecture == "llama" and kind in heads:
                # llama.cpp rotates neighbours where transformers rotates halves.
                count = int(self._model_field(heads[kind]))
                pairs = tensor.view(count, -1, 2, tensor.shape[1])
                tensor = pairs.transpose(1, 2).reshape(tensor.shape)
            yield _checkpoint_name(stored.name), tensor

    def _field(self, name: str, *default: Any) -> Any:
        field = self._reader.fields.get(name)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise UnsupportedModel(f"The GGUF file {self._path!r} does not say {name}.")

    def _model_field(self, name: str, *default: Any) -> Any:
        return self._field(f"{self._architecture}.{name}", *default)

    def _config(self) -> SimpleNamespace:
        """The attributes of a transformers configuration."""
        get = self._model_field
        shapes = {tensor.name: tensor.shape for tensor in self._reader.tensors}
        heads, hidden = get("attention.head_count"), get("embedding_length")
        scaling = get("rope.scaling.type", "none")
        return SimpleNamespace(
            model_type=self._architecture,
            vocab_size=int(shapes["token_embd.weight"][1]),
            hidden_size=hidden,
            intermediate_size=get("feed_forward_length"),
            num_hidden_layers=get("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=get("attention.head_count_kv", heads),
            head_dim=get("attention.key_length", hidden // heads),
            max_position_embeddings=get("context_length"),
            rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
            hidden_act="silu",
            sliding_window=get("attention.sliding_window", None),
            tie_word_embeddings="output.weight" not in shapes,
            rope_parameters={
                "rope_type": "default" if scaling == "none" else scaling,
                "rope_theta": get("rope.freq_base", 10000.0),
                "factor": get("rope.scaling.factor", 1.0),
            },
        )


def _reader(path: str) -> Any:
    try:
        import gguf
    except ImportError:
        raise UnsupportedModel(
            "Reading a GGUF file needs the gguf package: run `pip install gguf`."
        ) from None

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """It slices the file twice for each token of the vocabulary, and slicing a plain array
        takes less than half the time of slicing a memory map over the same pages."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

    try:
        return Reader(path)
    except ValueError as error:
        raise UnsupportedModel(f"{path!r} is not a readable GGUF file: {error}.") from error


def _dequantized(stored: Any) -> Tensor:
    import gguf

    try:
        values = gguf.dequantize(stored.data, stored.tensor_type)
    except NotImplementedError:
        kind = stored.tensor_type.name
        raise UnsupportedModel(f"GGUF weights of type {kind} are not supported.") from None
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _checkpoint_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown ones stay."""
    match name.split("."):
        case ["blk", index, kind, suffix] if kind in _LAYER:
            return f"model.layers.{index}.{_LAYER[kind]}.{suffix}"
        case [kind, suffix] if kind in _MODEL:
            return f"{_MODEL[kind]}.{suffix}"
    return name

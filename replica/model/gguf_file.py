"""Reads a llama.cpp model file: its configuration, and its weights, dequantised one by one.

It knows the names and conventions of GGUF, and gives them transformers' meaning. transformers
reads such files too, but parses the metadata anew for each question and finds names by search,
which takes several times as long as the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf, isclose
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replica.model.gguf_keys import check_keys
from replica.model.registry import spec_from_config
from replica.model.spec import LayerSpec, ModelSpec
from replica.model.unsupported import UnsupportedModel
from replica.model.weights import Weight, first_line, require_whole

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
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures of llama.cpp whose tensor names, keys and conventions this module knows."""
_ROTARY_FACTORS = "rope_freqs.weight"
_ENDS = ("eos", "eot", "eom")
"""Keys of the tokens that end a text, a turn, or a message that calls a tool."""


class _Contents(Mapping[str, Any]):
    """What fields hold, read when asked: the vocabulary takes a second."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> Any:
        return self._fields[name].contents()

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class GGUFFile:
    """A checkpoint in one file. Raises UnsupportedModel if the gguf package is missing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._reader = _reader(path)
        self._architecture: str = self._field("general.architecture")
        if self._architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"Model type {self._architecture!r} is not supported in a GGUF file, only "
                f"{', '.join(ARCHITECTURES)}."
            )

    def spec(self) -> ModelSpec:
        """Raises UnsupportedModel on models that cannot be served exactly."""
        check_keys(_Contents(self._reader.fields), self._architecture)
        named = (self._field(f"tokenizer.ggml.{end}_token_id", None) for end in _ENDS)
        spec = spec_from_config(self._config(), [token for token in named if token is not None])
        for tensor in self._reader.tensors:
            if tensor.name == _ROTARY_FACTORS:
                # How llama.cpp writes Llama 3.1's context scaling.
                divisors = _dequantized(tensor, self._path).tolist()
                if len(divisors) != spec.head_dim // 2 or not all(0 < d < inf for d in divisors):
                    raise UnsupportedModel(f"{_ROTARY_FACTORS} in {self._path!r} is not usable.")
                return replace(spec, layers=tuple(_slowed(one, divisors) for one in spec.layers))
        return spec

    def tensors(self) -> Iterator[Weight]:
        """Under transformers' names, float32 or as they were stored."""
        heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
        for stored in self._reader.tensors:
            if stored.name == _ROTARY_FACTORS:
                continue
            tensor = _dequantized(stored, self._path)
            kind = stored.name.split(".")[-2]
            if self._architecture == "llama" and kind in heads:
                # llama.cpp rotates neighbours where transformers rotates halves.
                count = int(self._model_field(heads[kind]))
                pairs = tensor.view(count, -1, 2, tensor.shape[1])
                tensor = pairs.transpose(1, 2).reshape(tensor.shape)
            yield Weight(_checkpoint_name(stored.name), tensor, self._path)

    def _field(self, name: str, *default: Any) -> Any:
        field = self._reader.fields.get(name)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise UnsupportedModel(f"The GGUF file {self._path!r} does not say {name}.")

    def _model_field(self, name: str, *default: Any) -> Any:
        return self._field(f"{self._architecture}.{name}", *default)

    def _count(self, name: str, *default: int) -> int:
        """A positive number that all layers share."""
        value = self._model_field(name, *default)
        if type(value) is not int or value < 1:
            raise UnsupportedModel(
                f"The GGUF option {name} ({value!r:.100}) must be one number for all layers."
            )
        return value

    def _config(self) -> SimpleNamespace:
        """The attributes of a transformers configuration."""
        get = self._model_field
        shapes = {tensor.name: tensor.shape for tensor in self._reader.tensors}
        if "token_embd.weight" not in shapes:
            raise UnsupportedModel(f"{self._path!r} holds no token_embd.weight.")
        count = self._count
        self._check_window()
        heads, hidden = count("attention.head_count"), count("embedding_length")
        self._check_heads(head_dim := count("attention.key_length", hidden // heads))
        return SimpleNamespace(
            model_type=self._architecture,
            vocab_size=int(shapes["token_embd.weight"][1]),
            hidden_size=hidden,
            intermediate_size=count("feed_forward_length"),
            num_hidden_layers=count("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=count("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=count("context_length"),
            rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
            hidden_act="silu",
            tie_word_embeddings="output.weight" not in shapes,
            rope_parameters=self._rope_parameters(),
        )

    def _check_window(self) -> None:
        """llama.cpp has no windows in these architectures, whatever a file says. Raises
        UnsupportedModel if a sequence could outgrow what it says."""
        window = self._model_field("attention.sliding_window", 0)
        if window and window < self._count("context_length"):
            raise UnsupportedModel(
                f"The GGUF option attention.sliding_window ({window!r:.100}) is not supported."
            )

    def _rope_parameters(self) -> dict[str, Any]:
        """As llama.cpp reads them: scaling is linear where its type is not named, and a factor of
        0 is none. Old files have another name for that."""
        get = self._model_field
        kind = get("rope.scaling.type", "linear")
        factor = get("rope.scaling.factor", 0.0) or get("rope.scale_linear", 0.0) or 1.0
        if kind not in ("none", "linear"):
            raise UnsupportedModel(
                f"The GGUF option rope.scaling.type ({kind!r}) is not supported."
            )
        if kind == "none" or factor == 1.0:
            kind = "default"
        theta = get("rope.freq_base", 10000.0)
        return {"rope_type": kind, "rope_theta": theta, "factor": factor}

    def _check_heads(self, head_dim: Any) -> None:
        """Attention as the decoder computes it: whole heads, turned as a whole."""
        for key in ("attention.value_length", "rope.dimension_count"):
            if (value := self._model_field(key, head_dim)) != head_dim:
                raise UnsupportedModel(
                    f"The GGUF option {key} ({value!r:.100}) is not supported where heads have the "
                    f"size {head_dim!r:.100}."
                )
        scale = self._model_field("attention.scale", 0.0)
        if scale and not isclose(scale, head_dim**-0.5, rel_tol=1e-6):
            raise UnsupportedModel(f"The GGUF option attention.scale ({scale}) is not supported.")


def _slowed(layer: LayerSpec, divisors: list[float]) -> LayerSpec:
    pairs = zip(layer.frequencies, divisors, strict=True)
    return replace(layer, frequencies=tuple(f / d for f, d in pairs))


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

    require_whole(Path(path))
    try:
        return Reader(path)
    except Exception as error:  # whatever it stumbles over in what it takes for a header
        raise UnsupportedModel(
            f"{path!r} is not a readable GGUF file, or only a part of one: {first_line(error)}"
        ) from error


def _dequantized(stored: Any, path: str) -> Tensor:
    import gguf

    try:
        values = gguf.dequantize(stored.data, stored.tensor_type)
    except NotImplementedError:
        raise UnsupportedModel(
            f"The weight {stored.name!r} in {path!r} is of the type {stored.tensor_type.name}, "
            f"which is not supported."
        ) from None
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _checkpoint_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown ones stay."""
    match name.split("."):
        case ["blk", index, kind, suffix] if kind in _LAYER:
            return f"model.layers.{index}.{_LAYER[kind]}.{suffix}"
        case [kind, suffix] if kind in _MODEL:
            return f"{_MODEL[kind]}.{suffix}"
    return name

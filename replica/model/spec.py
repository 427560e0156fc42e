"""What a model computes: a plain value, read from its configuration before any weight is.

It knows no arithmetic. What may differ from layer to layer stands in `LayerSpec`; the block that
puts norms, attention and MLP together is chosen by `model_type` (`replica.model.registry`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu_tanh"]
DTypeName: TypeAlias = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """How one layer attends, and what its MLP applies."""

    frequencies: tuple[float, ...]
    """[head_dim / 2] radians per position, any context scaling included."""
    scale: float
    """Factor on attention scores, the products of queries and keys."""
    window: int | None = None
    """Keys that a query sees, its own included; None for all before it."""
    soft_cap: float | None = None
    """c in c * tanh(score / c), applied after `scale`; None for no cap."""
    activation: Activation = "silu"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of a model and what its weights mean."""

    model_type: str
    vocab_size: int
    """Rows of the output projection."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    """Longest sequence that is computed as the model was trained to, in tokens."""
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    """The projection behind the attention has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head before the rotation."""
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    """c in c * tanh(logit / c); None for no cap."""
    tied_embeddings: bool = False
    """The output projection is the embedding."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: DTypeName = "float32"
    """The type that holds the stored weights without loss."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

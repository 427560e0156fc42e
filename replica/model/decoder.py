"""A decoder-only transformer of the Llama family over flat, packed tokens.

It knows shapes and arithmetic: neither where weights come from, nor which sequence a token
belongs to. Attention over the KV pool is handed in with each step, and nothing in here lets one
token see another: rotary angles come from each token's own position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from replica.model.attention import Attend
from replica.model.layer_ops import LayerOps, layer_ops
from replica.model.linear import Linear
from replica.model.rotary import QKNorm, Rotation


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of a model and what its weights mean."""

    model_type: str
    vocab_size: int
    """Rows of the output projection."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest sequence that it was trained for, in tokens."""
    norm_eps: float
    rotary_frequencies: tuple[float, ...]
    """[head_dim / 2] radians per position, any context scaling included."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head before the rotation."""
    tied_embeddings: bool = False
    """The output projection is the embedding."""
    eos_token_ids: tuple[int, ...] = ()


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    qk_scale: nn.Parameter | None

    def __init__(
        self, spec: ModelSpec, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        hidden, heads, kv_heads = spec.hidden_size, spec.num_heads, spec.num_kv_heads

        def linear(inputs: int, outputs: int, *, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, bias, device, dtype)

        self.spec = spec
        self.index = index
        self.attention_norm = nn.RMSNorm(hidden, spec.norm_eps, device=device, dtype=dtype)
        self.qkv = linear(hidden, (heads + 2 * kv_heads) * spec.head_dim, bias=spec.qkv_bias)
        scale = torch.empty(heads + kv_heads, spec.head_dim, device=device, dtype=dtype)
        self.qk_scale = nn.Parameter(scale) if spec.qk_norm else None
        self.output = linear(heads * spec.head_dim, hidden)
        self.mlp_norm = nn.RMSNorm(hidden, spec.norm_eps, device=device, dtype=dtype)
        self.gate_up = linear(hidden, 2 * spec.intermediate_size)
        self.down = linear(spec.intermediate_size, hidden)

    def forward(
        self,
        ops: LayerOps,
        residual: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        attend: Attend,
    ) -> Tensor:
        """residual: [T, hidden_size], changed in place. update: what the layer before still has
        to add to it. Returns what this layer still has to add: adding goes with the next norm."""
        x = ops.add_norm(residual, update, self.attention_norm)
        heads = attend(self.index, ops.linear(x, self.qkv), rotation, self.qk_norm)
        x = ops.add_norm(residual, ops.linear(heads, self.output), self.mlp_norm)
        return ops.linear(ops.gated(x, self.gate_up), self.down)

    @property
    def qk_norm(self) -> QKNorm | None:
        return None if self.qk_scale is None else QKNorm(self.qk_scale, self.spec.norm_eps)

    def checkpoint_views(self) -> dict[str, Tensor]:
        spec = self.spec
        kv_size = spec.num_kv_heads * spec.head_dim
        sizes = [spec.num_heads * spec.head_dim, kv_size, kv_size]
        q, k, v = torch.split(self.qkv.weight, sizes)
        gate, up = self.gate_up.weight.chunk(2)
        views = {
            "input_layernorm.weight": self.attention_norm.weight,
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": self.output.weight,
            "post_attention_layernorm.weight": self.mlp_norm.weight,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": self.down.weight,
        }
        if spec.qkv_bias:
            q, k, v = torch.split(self.qkv.bias, sizes)
            views |= {"self_attn.q_proj.bias": q, "self_attn.k_proj.bias": k}
            views |= {"self_attn.v_proj.bias": v}
        if self.qk_scale is not None:
            q, k = torch.split(self.qk_scale, [spec.num_heads, spec.num_kv_heads])
            views |= {"self_attn.q_norm.weight": q, "self_attn.k_norm.weight": k}
        return views


class Decoder(nn.Module):
    """The whole model. Its weights are uninitialised until they are loaded."""

    frequencies: Tensor

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.embedding = nn.Parameter(embedding)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, index, dtype, device) for index in range(spec.num_layers)
        )
        self.norm = nn.RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.head = Linear(spec.hidden_size, spec.vocab_size, False, device, dtype)
        if spec.tied_embeddings:
            self.head.weight = self.embedding
        frequencies = torch.tensor(spec.rotary_frequencies, dtype=torch.float32, device=device)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.ops: LayerOps = layer_ops(device)
        self.requires_grad_(False)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        sample_index: Tensor,
        logits: Tensor,
        ops: LayerOps | None = None,
    ) -> None:
        """One step.

        token_ids, positions: int64 [T], the tokens of all rows in the order of `attend`'s
        metadata. sample_index: int64 [S], the tokens whose logits are wanted; may be empty.
        logits: float32 [S, vocab_size], where they go. ops: if not its own.
        """
        ops = ops or self.ops
        residual, update = F.embedding(token_ids, self.embedding), None
        rotation = ops.rotation(positions, self.frequencies, residual.dtype)
        for layer in self.decoder_layers():
            update = layer(ops, residual, update, rotation, attend)
        if not len(sample_index):  # a chunk in the middle of a prompt wants KV, and nothing else
            return
        x = ops.add_norm(residual, update, self.norm)
        ops.logits(x.index_select(0, sample_index), self.head, logits)

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def checkpoint_views(self) -> Mapping[str, Tensor]:
        """Tensor names of transformers' checkpoints, and the part of a weight that each fills."""
        views: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm.weight,
        }
        if not self.spec.tied_embeddings:
            views["lm_head.weight"] = self.head.weight
        for index, layer in enumerate(self.decoder_layers()):
            for name, view in layer.checkpoint_views().items():
                views[f"model.layers.{index}.{name}"] = view
        return views

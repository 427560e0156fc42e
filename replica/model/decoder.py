"""A decoder-only transformer over flat, packed tokens.

It knows shapes and arithmetic: neither where weights come from, nor which sequence a token
belongs to. Attention over the KV pool is handed in with each step, and nothing in here lets one
token see another: rotary angles come from each token's own position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from replica.model.attention.metadata import Attend
from replica.model.block import Block
from replica.model.layer_ops import LayerOps, layer_ops
from replica.model.linear import Linear
from replica.model.norm import RMSNorm
from replica.model.registry import block_class
from replica.model.spec import ModelSpec


class Decoder(nn.Module):
    """The whole model. Its weights are uninitialised until they are loaded."""

    frequencies: Tensor
    """float32 [n, head_dim / 2]: the n different sets of rotary frequencies that layers use."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.embedding = nn.Parameter(embedding)
        block = block_class(spec.model_type)
        self.layers = nn.ModuleList(
            block(spec, index, dtype, device) for index in range(spec.num_layers)
        )
        self.norm = RMSNorm(
            spec.hidden_size, spec.norm_eps, offset=block.norm_offset, dtype=dtype, device=device
        )
        self.head = Linear(spec.hidden_size, spec.vocab_size, False, device, dtype)
        if spec.tied_embeddings:
            self.head.weight = self.embedding
        # Rounded as the embedding is.
        self._scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))
        rotations = list(dict.fromkeys(layer.frequencies for layer in spec.layers))
        self._rotations = [rotations.index(layer.frequencies) for layer in spec.layers]
        frequencies = torch.tensor(rotations, dtype=torch.float32, device=device)
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
        if self._scale != 1:
            residual *= self._scale
        rotations = [ops.rotation(positions, way, residual.dtype) for way in self.frequencies]
        for block, way in zip(self.blocks(), self._rotations, strict=True):
            update = block(ops, residual, update, rotations[way], attend)
        if not len(sample_index):  # a chunk in the middle of a prompt wants KV, and nothing else
            return
        x = ops.add_norm(residual, update, self.norm)
        ops.logits(x.index_select(0, sample_index), self.head, logits)
        if (cap := self.spec.logit_soft_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)

    def blocks(self) -> Iterator[Block]:
        for block in self.layers:
            assert isinstance(block, Block)
            yield block

    def checkpoint_views(self) -> Mapping[str, Tensor]:
        """Tensor names of transformers' checkpoints, and the part of a weight that each fills."""
        views: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm.weight,
        }
        if not self.spec.tied_embeddings:
            views["lm_head.weight"] = self.head.weight
        for index, block in enumerate(self.blocks()):
            for name, view in block.checkpoint_views().items():
                views[f"model.layers.{index}.{name}"] = view
        return views

"""Gives a decoder the fastest arithmetic that this CPU has, and lays its weights out for it."""

from __future__ import annotations

import logging

import torch

from replica.model.cpu import onednn
from replica.model.cpu.library import NoLibrary, load
from replica.model.cpu.native import NativeOps
from replica.model.decoder import Decoder
from replica.model.layer_ops import TorchOps
from replica.model.linear import Linear

logger = logging.getLogger(__name__)


def pack(decoder: Decoder, ops: TorchOps) -> None:
    """From now on the decoder computes with `ops`. Weights are laid out one by one; a tied output
    projection becomes a second copy of the embedding."""
    decoder.ops = ops
    for module in decoder.modules():
        if isinstance(module, Linear) and module.format is None:
            ops.pack(module)


def choose(dtype: torch.dtype, cache_dir: str) -> TorchOps:
    """oneDNN has the matrix units of newer CPUs. On vector units ours are faster: they stream
    weights at the speed of memory, and multiply bfloat16 as float32, at twice the rate."""
    if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return onednn.OneDnnOps()
    try:
        return NativeOps(load(cache_dir), dtype)
    except NoLibrary as reason:
        logger.warning("Slower products, of torch: %s", reason)
    return onednn.OneDnnOps() if onednn.is_available(dtype) else TorchOps()

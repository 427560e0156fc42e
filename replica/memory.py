"""How large the KV pool of a GPU can be: the memory that weights, workspace and graphs leave.

Measured, not estimated: the largest step and the largest graphs run once over a pool of one
block. What further graphs will take is extrapolated from those.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import numpy as np
import torch

from replica.config import EngineConfig
from replica.device.cuda import CudaDevice, CudaRecorder
from replica.device.graph_pool import GraphPool
from replica.io_slot import Sizes, input_layout, packed
from replica.model.decoder import Decoder
from replica.model.kv_cache import block_bytes
from replica.model.runner import DecoderRunner
from replica.pipeline import Pipeline
from replica.scheduling.batch import MAX_SCORES, Batch, Scores

GIB = 2**30
SPLIT_TOKENS = 512
"""Tokens of a chunk whose attention is split into as many parts as the GPU can run at once; the
parts' results need memory."""


class NotEnoughMemory(ValueError):
    """The engine was asked for more than the device has. The message has the numbers."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the bytes of device memory are divided."""

    total: int
    share: int
    """Bytes that the engine may use."""
    before: int
    """Bytes in use by weights, CUDA and other processes, before the engine allocates anything
    else."""
    workspace: int
    """Activations, graphs and buffers."""
    block: int

    @property
    def kv_pool(self) -> int:
        return self.share - self.before - self.workspace

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can own; one more is the guard block."""
        return max(0, self.kv_pool // self.block - 1)

    def __str__(self) -> str:
        parts = (self.share, self.total, self.before, self.workspace, self.kv_pool)
        share, total, before, workspace, kv_pool = (f"{part / GIB:.2f} GiB" for part in parts)
        return (
            f"of {total} of device memory the engine may use {share} (engine.memory_fraction); "
            f"weights and other processes take {before}, activations and graphs {workspace}, "
            f"which leaves {kv_pool} for the KV pool"
        )


def with_kv_pool(
    config: EngineConfig, decoder: Decoder, device: CudaDevice, graph_sizes: tuple[int, ...]
) -> EngineConfig:
    """The configuration with `kv_tokens` known to fit. Raises NotEnoughMemory."""
    plan = measure(config, decoder, device, graph_sizes)
    if config.kv_tokens is not None:
        if config.num_blocks > plan.num_blocks:
            need = (config.num_blocks + 1) * plan.block / GIB
            raise NotEnoughMemory(
                f"engine.kv_tokens is {config.kv_tokens}, which takes {need:.2f} GiB, but {plan}: "
                f"{plan.num_blocks * config.block_size} tokens."
            )
        return config
    if not plan.num_blocks:
        raise NotEnoughMemory(f"There is no room for a KV pool: {plan}.")
    return replace(config, kv_tokens=plan.num_blocks * config.block_size)


def measure(
    config: EngineConfig, decoder: Decoder, device: CudaDevice, graph_sizes: tuple[int, ...]
) -> MemoryPlan:
    """Run what takes most memory once. Raises NotEnoughMemory if even that does not fit."""
    device.settle()
    _give_back()
    before = device.total_bytes() - device.free_bytes()
    try:
        workspace = _rehearse(config, decoder, device, graph_sizes)
    except torch.OutOfMemoryError as error:
        raise NotEnoughMemory(
            f"Beside {before / GIB:.2f} GiB that are in use already, the largest step does not "
            f"fit into {device.total_bytes() / GIB:.2f} GiB: lower engine.max_step_tokens or "
            f"engine.max_rows. {error}"
        ) from error
    _give_back()
    return MemoryPlan(
        total=device.total_bytes(),
        share=int(device.total_bytes() * config.memory_fraction),
        before=before,
        workspace=workspace,
        block=block_bytes(decoder.spec, config.block_size, decoder.embedding.dtype),
    )


def _give_back() -> None:
    """To the device, what nobody holds any more."""
    gc.collect()
    torch.cuda.empty_cache()


def _rehearse(
    config: EngineConfig, decoder: Decoder, device: CudaDevice, graph_sizes: tuple[int, ...]
) -> int:
    """Bytes that steps take beside the KV pool."""
    free = device.free_bytes()
    runner = DecoderRunner(decoder, 1, config.block_size)
    sizes = Sizes(
        max_rows=config.max_rows,
        max_step_tokens=config.max_step_tokens,
        table_width=1,
        vocab_size=runner.vocab_size,
        guard=1,
        block_size=config.block_size,
    )
    longest = config.max_model_len or decoder.spec.max_position
    for count in {config.max_step_tokens, min(config.max_step_tokens, SPLIT_TOKENS)}:
        _run_chunk(runner, sizes, device, count, longest)
    graphs = GraphPool(CudaRecorder(device), graph_sizes[-1:], device.free_bytes)
    pipeline = Pipeline(runner, sizes, device, graphs=graphs)
    pipeline.capture()
    # The second slot's graphs found the shared pool in place: they took what any other will.
    further = [report.recording.memory_bytes for report in graphs.reports() if report.key.slot]
    return free - device.free_bytes() + 2 * sum(further) * max(0, len(graph_sizes) - 1)


def _run_chunk(
    runner: DecoderRunner, sizes: Sizes, device: CudaDevice, count: int, context: int
) -> None:
    """A prompt chunk of `count` tokens, all of which go to the first slot of the pool.

    The attention is launched as for that context and finds a row without queries: its time
    depends on them, its memory does not.
    """
    scores = Scores(np.zeros(MAX_SCORES, np.intp), np.zeros(MAX_SCORES, np.int32), ())
    starts = np.array([max(0, context - count)], np.int32)
    lengths = np.array([count], np.int32)
    chunk = replace(Batch.padding(1), starts=starts, lengths=lengths, scores=scores)
    _, inputs = packed(input_layout(sizes), device.memory)
    logits = torch.empty(chunk.num_logits, sizes.vocab_size, device=device.memory)
    device.settle()

    def forward() -> None:
        runner.forward(chunk, inputs["token_ids"][:count], inputs, logits)

    device.stream("compute").run(forward)
    device.settle()

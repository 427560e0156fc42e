"""Times the ways to compute each product at start, and keeps the fastest on disk.

A product is timed over the weights of all layers in turn, in a graph, as a step does it: with one
weight only, the second run would find it in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
import triton
from tqdm import tqdm

from replica.compiled_files import is_sound
from replica.device.cuda import CudaDevice, CudaRecorder, CudaRecording
from replica.device.stream import Work
from replica.model.decoder import Decoder
from replica.model.gpu.ops import GpuOps, ProductKey, product_key
from replica.model.gpu.padding import ROUND, empty_rows, rounded
from replica.model.gpu.skinny import MAX_TOKENS, Plan, plans, supported, tile_tokens
from replica.model.linear import Linear
from replica.model.norm import RMSNorm

REPLAYS, ROUNDS = 4, 6


class Remembered:
    """Plans by key, in a file for this GPU model, these libraries, kernels and type of weights.

    A file that cannot be read, or that holds what nobody would write today, counts as empty.
    """

    def __init__(self, folder: Path, device: CudaDevice, dtype: torch.dtype) -> None:
        name = torch.cuda.get_device_name(device.memory)
        about = (name, torch.__version__, triton.__version__, str(dtype), _sources())
        digest = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
        self._path = folder / f"products-{digest}.json"
        self._known: dict[str, Plan | None] = {}
        with contextlib.suppress(OSError, ValueError):
            self._known = _FORMAT.decode(self._path.read_bytes())

    def knows(self, key: ProductKey, candidates: Sequence[Plan]) -> bool:
        """Whether what is best is known, and can still be had."""
        return str(key) in self._known and self.get(key) in (None, *candidates)

    def get(self, key: ProductKey) -> Plan | None:
        return self._known[str(key)]

    def put(self, key: ProductKey, plan: Plan | None) -> None:
        self._known[str(key)] = plan

    def save(self) -> None:
        """Whole or not at all; without a folder to write to, the next start measures again."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_suffix(f".{os.getpid()}")
            draft.write_bytes(msgspec.json.encode(self._known))
            draft.replace(self._path)


_FORMAT = msgspec.json.Decoder(dict[str, Plan | None])


def _sources() -> str:
    """Digest of the kernels: what was fastest before they changed may not be so now."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def keep_compiled(cache_dir: str) -> None:
    """Have Triton keep what it compiles in this process in that folder, if it can be written.
    What is there and cannot be loaded is compiled again."""
    folder = Path(cache_dir).expanduser() / "triton"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        triton.knobs.cache.dir = str(folder)
        for kernel in folder.iterdir():
            if not is_sound(kernel):
                shutil.rmtree(kernel, ignore_errors=True)


def tune(decoder: Decoder, max_rows: int, device: CudaDevice, cache_dir: str) -> None:
    """Give the decoder's products plans, for steps of up to `max_rows` tokens."""
    ops = decoder.ops
    assert isinstance(ops, GpuOps)
    dtype = decoder.embedding.dtype
    remembered = Remembered(Path(cache_dir).expanduser(), device, dtype)
    products = dict(_products(decoder, max_rows))
    unknown = [
        key for key in products if not remembered.knows(key, _candidates(key, products[key]))
    ]
    for key in tqdm(unknown, desc="Timing products", unit="product", disable=not unknown):
        remembered.put(key, _fastest(key, products[key], device))
    if unknown:
        remembered.save()
    ops.plans.update({key: remembered.get(key) for key in products})


def load_products(decoder: Decoder, max_tokens: int, max_logits: int, device: CudaDevice) -> None:
    """Have cuBLAS see every number of tokens that prompt chunks will come with: the first time it
    thinks, and may load a kernel, which holds that step up for up to twenty milliseconds."""
    block = next(decoder.blocks())
    ops = decoder.ops.for_chunks()
    head, like = decoder.head, decoder.embedding

    def work() -> None:
        for tokens in range(ROUND, rounded(max_tokens) + 1, ROUND):
            for linear in (block.qkv, block.output, block.gate_up, block.down):
                ops.linear(empty_rows(like, tokens, linear.in_features), linear)
        logits = torch.empty(max_logits, head.out_features, device=like.device)
        for tokens in (*range(ROUND, max_logits, ROUND), max_logits):
            x = empty_rows(like, tokens, head.in_features)
            ops.logits(x, head, logits[:tokens])

    device.stream("compute").run(work)
    device.settle()


def _products(decoder: Decoder, max_rows: int) -> Iterator[tuple[ProductKey, Sequence[Linear]]]:
    """The products that there is a kernel for, with the weights of all layers."""
    found: dict[ProductKey, list[Linear]] = defaultdict(list)
    sizes = {tile_tokens(tokens) for tokens in range(1, min(max_rows, MAX_TOKENS) + 1)}
    for tokens in sorted(sizes):
        for block in decoder.blocks():
            for linear in (block.qkv, block.output, block.down):
                found[product_key("linear", linear, tokens)].append(linear)
            if block.gate_up.is_bare:
                found[product_key("gated", block.gate_up, tokens)].append(block.gate_up)
        found[product_key("logits", decoder.head, tokens)].append(decoder.head)
    for key, layers in found.items():
        if layers[0].format is None and supported(layers[0].weight):
            yield key, layers


def _candidates(key: ProductKey, layers: Sequence[Linear]) -> list[Plan]:
    gated, whole = key.kind == "gated", key.kind == "logits"
    return plans(layers[0].weight, key.tokens, gated=gated, whole=whole)


def _fastest(key: ProductKey, layers: Sequence[Linear], device: CudaDevice) -> Plan | None:
    """Timed in rounds, the best round of each counts: what slows the GPU for a moment, or its
    clock at the beginning, slows all that are compared."""
    recorder = CudaRecorder(device)
    times: dict[Plan | None, float] = {}

    def measure() -> None:
        recordings = {}
        for plan in (None, *_candidates(key, layers)):
            # There may be no such kernel for this GPU.
            with contextlib.suppress(RuntimeError, triton.TritonError):
                ops = GpuOps(device.memory, {key: plan})
                recordings[plan] = recorder(_work(ops, key, layers))
        for _ in range(ROUNDS):
            for plan, recording in recordings.items():
                took_ms = recorder.timed_ms(partial(_replay, recording))
                times[plan] = min(took_ms, times.get(plan, took_ms))

    device.stream("compute").run(measure)
    return min(times, key=lambda plan: times[plan])


def _replay(recording: CudaRecording) -> None:
    """Several times, so that the launch of the first counts little."""
    for _ in range(REPLAYS):
        recording.replay()


def _work(ops: GpuOps, key: ProductKey, layers: Sequence[Linear]) -> Work:
    """All products once, each with what reads it: adding up many parts takes time too."""
    weight = layers[0].weight
    x = torch.ones(key.tokens, key.inputs, dtype=weight.dtype, device=weight.device)
    outputs = x.new_zeros(key.tokens, key.outputs)
    logits = outputs.to(torch.float32)
    norm = RMSNorm(key.outputs, 1e-5, dtype=weight.dtype, device=weight.device)

    def work() -> None:
        for layer in layers:
            if key.kind == "logits":
                ops.logits(x, layer, logits)
            elif key.kind == "gated":
                ops.gated(x, layer, "silu")  # others take as long
            else:
                ops.add_norm(outputs, ops.linear(x, layer), norm)

    return work

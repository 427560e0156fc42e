"""Starts an engine of a shape with random weights made in place, as the engine's process does, and
says when each phase was over. Arguments: shape, folder of caches. Prints seconds since the start
of the process, the last line when it is ready.
"""

from __future__ import annotations

import sys
import time

BEGAN = time.time()


def main() -> None:
    import torch

    from benchmarks.bench_engine import Recorder
    from benchmarks.shapes import SHAPES, random_decoder
    from replica.config import EngineConfig
    from replica.device.cuda import CudaDevice
    from replica.process import assemble

    shape, cache_dir = sys.argv[1:]
    config = EngineConfig(
        model="random",
        device="cuda",
        max_rows=256,
        max_model_len=8192,
        block_size=64,
        max_step_tokens=8192,
        cache_dir=cache_dir,
    )
    note("imported")
    device = CudaDevice()
    decoder = random_decoder(SHAPES[shape], torch.bfloat16, device.memory)
    note("weights")
    assemble(config, decoder, device, Recorder())
    note("ready")


def note(phase: str) -> None:
    print(f"{phase:<20} {time.time() - BEGAN:.2f}", flush=True)


if __name__ == "__main__":
    main()

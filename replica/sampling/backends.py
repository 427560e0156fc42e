"""The sampler of a device."""

from __future__ import annotations

import torch

from replica.sampling.sampler import Sampler


def make_sampler(max_rows: int, vocab_size: int, device: torch.device) -> Sampler:
    """In torch's words on a CPU, in kernels on a GPU."""
    if device.type == "cpu":
        return Sampler(max_rows, vocab_size, device)
    # Triton is installed where there is a GPU only.
    from replica.sampling.gpu.sampler import GpuSampler

    return GpuSampler(max_rows, vocab_size, device)

"""Programmatic dependent launch: a kernel starts before the one in front of it has ended.

A kernel says `start` first, which lets the next one start, and `wait` before it reads what other
kernels wrote, or writes anything: then all kernels before it have ended. In between it may read
weights and the step's inputs, which no kernel writes.
Annotations are evaluated here: Triton finds its compile-time constants by them.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launches_early(device: torch.device) -> bool:
    """Whether this GPU can: from compute capability 9 on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def start(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Every program has to come by here, even one with nothing to do: the next kernel takes the
    end of this one for the end of all before."""
    if DEPENDENT:
        gdc_wait()

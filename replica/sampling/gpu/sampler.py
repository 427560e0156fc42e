"""Sampling on a GPU: as `replica.sampling.sampler`, in two or three kernels instead of many
dozens."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from replica.sampling.gpu.choose import choose
from replica.sampling.gpu.shaping import shape
from replica.sampling.sampler import Sampler
from replica.scheduling.batch import Batch


class GpuSampler(Sampler):
    """The kernels read each row's parameters on the device, so that one graph serves rows of all
    kinds, and a row pays for its own wishes only."""

    def sample(
        self, batch: Batch, inputs: Mapping[str, Tensor], logits: Tensor, mask: Tensor | None
    ) -> Tensor:
        count = len(batch.samples)
        rows = inputs["sample_rows"][:count]
        positions = inputs["sample_positions"][:count]
        ints, floats = self.ints, self.floats
        if batch.shaped or batch.held or mask is not None:
            logits = shape(
                logits, rows, positions, ints, floats, self.shaping, mask, counted=batch.shaped
            )
        token_ids = choose(logits, rows, positions, ints, floats, self.last_token)
        if batch.shaped:
            self.shaping.count(rows, token_ids)
        return token_ids

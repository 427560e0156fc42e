"""Three streams, two slots, and the events between them.

    stream    work of step N in slot S = N mod 2          waits for      records
    h2d       pinned host S -> device inputs S            nothing        h2d_done[S]
    compute   forward, then sampling                      h2d_done[S]    compute_done[S]
    d2h       sampled ids -> pinned host S                compute_done[S]  d2h_done[S]
    CPU       reads the results (`collect`)               d2h_done[S]

Nothing else needs an event: `launch(N+2)` follows `collect(N)`, and that implies that the
upload, the forward and the download of step N are over, so slot S is free to be filled again.
The pipeline knows neither requests nor models; it is the same code over CUDA and host streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replica.batch import Batch, StepOutput
from replica.io_slot import IOSlot, Sizes
from replica.masks import MaskBuilder
from replica.rows import Rows
from replica.runner import ModelRunner
from replica.sampler import Sampler
from replica.stream import Device, Event

RING = 4
"""Steps whose timing events are kept: those of step N are read after N+1 was launched."""


@dataclass(slots=True)
class Timing:
    """When the compute stream worked for a step. Two intervals if sampling waited for masks."""

    start: Event
    forward_end: Event
    sampling_start: Event
    end: Event
    split: bool = False

    def intervals_ns(self) -> list[tuple[int, int]]:
        start, end = self.start.time_ns(), self.end.time_ns()
        if not self.split:
            return [(start, end)]
        return [(start, self.forward_end.time_ns()), (self.sampling_start.time_ns(), end)]


@dataclass(slots=True)
class _Lane:
    """A slot and its events."""

    slot: IOSlot
    h2d_done: Event
    mask_done: Event
    compute_done: Event
    d2h_done: Event


class Pipeline:
    """Launches steps and collects them, one step behind. `in_flight` is the newest launch.

    `on_idle`, if given, is called with a slot as soon as nothing may read it (race tests).
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: Rows,
        sizes: Sizes,
        device: Device,
        on_idle: Callable[[IOSlot], None] | None = None,
    ) -> None:
        self.in_flight: Batch | None = None
        self._on_idle = on_idle
        self._runner = runner
        self._rows = rows
        self._sampler = Sampler(sizes.max_rows, sizes.vocab_size)
        self._h2d, self._compute, self._d2h = (
            device.stream(name) for name in ("h2d", "compute", "d2h")
        )
        h2d, compute, d2h = self._h2d, self._compute, self._d2h
        self._lanes = [
            _Lane(
                IOSlot(sizes),
                h2d_done=device.event(h2d),
                mask_done=device.event(h2d),
                compute_done=device.event(compute),
                d2h_done=device.event(d2h),
            )
            for _ in range(2)
        ]
        self._timings = [
            Timing(
                start=device.event(compute),
                forward_end=device.event(compute),
                sampling_start=device.event(compute),
                end=device.event(compute),
            )
            for _ in range(RING)
        ]

    def launch(self, batch: Batch | None) -> None:
        """Enqueue a step up to its result, or up to its logits if a row is constrained."""
        self.in_flight = batch
        if batch is None:
            return
        lane, timing = self._lanes[batch.step % 2], self._timings[batch.step % RING]
        slot = lane.slot
        slot.fill(batch, self._rows)
        self._h2d.run(slot.upload)
        # Producer: upload. Consumer: forward. Else it would read the inputs of step N-2.
        lane.h2d_done.record()
        lane.h2d_done.block(self._compute)
        timing.start.record()
        self._compute.run(lambda: self._forward(batch, slot))
        timing.split = batch.constrained
        if not batch.constrained:
            self._sample(batch, lane, timing)

    def finish(self, batch: Batch | None, masks: MaskBuilder) -> None:
        """Constrained rows: build the masks while the forward runs, then enqueue the rest.

        Called after the previous step was settled, so that the masks see its tokens.
        """
        if batch is None or not batch.constrained:
            return
        lane, timing = self._lanes[batch.step % 2], self._timings[batch.step % RING]
        timing.forward_end.record()
        masks.fill(batch, lane.slot.host_mask())
        self._h2d.run(lane.slot.upload_mask)
        # Producer: mask upload. Consumer: sampling. Else it would use the mask of step N-2.
        lane.mask_done.record()
        lane.mask_done.block(self._compute)
        timing.sampling_start.record()
        self._sample(batch, lane, timing)

    def collect(self, batch: Batch | None) -> StepOutput | None:
        """Wait for a step's results: the only place where the CPU blocks."""
        if batch is None:
            return None
        lane = self._lanes[batch.step % 2]
        # Producer: download. Consumer: this thread. Else it would read the ids of step N-2.
        lane.d2h_done.synchronize()
        output = StepOutput(batch, lane.slot.results(len(batch.samples)))
        if self.in_flight is batch:
            self.in_flight = None
        if self._on_idle is not None:
            self._on_idle(lane.slot)
        return output

    def timing(self, batch: Batch) -> list[tuple[int, int]]:
        """When the device computed a collected step: (start, end) pairs in ns."""
        return self._timings[batch.step % RING].intervals_ns()

    def close(self) -> None:
        """Let enqueued work end and give the streams up."""
        for stream in (self._h2d, self._compute, self._d2h):
            stream.close()

    def _forward(self, batch: Batch, slot: IOSlot) -> None:
        self._sampler.admit_rows(batch, slot.device)
        input_ids = self._sampler.input_ids(batch, slot.device)
        slot.logits = self._runner.forward(batch, input_ids, slot.device)

    def _sample(self, batch: Batch, lane: _Lane, timing: Timing) -> None:
        slot = lane.slot
        if len(batch.samples):
            self._compute.run(lambda: self._choose(batch, slot))
        timing.end.record()
        # Producer: sampling. Consumer: download. Else it would fetch the ids of step N-2.
        lane.compute_done.record()
        lane.compute_done.block(self._d2h)
        self._d2h.run(slot.download)
        lane.d2h_done.record()

    def _choose(self, batch: Batch, slot: IOSlot) -> None:
        logits, slot.logits = slot.logits, None
        assert logits is not None, "sampling before the forward pass"
        count = len(batch.samples)
        mask = slot.mask[:count] if batch.constrained else None
        slot.sampled[:count] = self._sampler.sample(batch, slot.device, logits, mask)

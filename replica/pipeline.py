"""Three streams, two slots, and the events between them.

    stream    work of step N in slot S = N mod 2          waits for      records
    h2d       pinned host S -> device inputs S            nothing        h2d_done[S]
    compute   forward, then sampling                      h2d_done[S]    compute_done[S]
    d2h       sampled ids -> pinned host S                compute_done[S]  d2h_done[S]
    CPU       reads the results (`collect`)               d2h_done[S]

Nothing else needs an event: `launch(N+2)` follows `collect(N)`, and that implies that the
upload, the forward and the download of step N are over, so slot S is free to be filled again.
The pipeline knows neither requests nor models; it is the same code over CUDA and host streams.

What persists between steps (logits, the sampler's state) is single and belongs to the compute
stream alone. With graphs, forward and sampling are replayed where their shape was recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from replica.device.graph_pool import GraphKey, Graphs, NoGraphs, SamplingKind
from replica.device.stream import Device, Event, Work
from replica.io_slot import LOGPROBS, SCORES, IOSlot, Sizes
from replica.model.runner import ModelRunner
from replica.sampling.backends import make_sampler
from replica.sampling.logprobs import write_logprobs
from replica.scheduling.batch import MAX_SCORES, Batch, StepOutput
from replica.scheduling.sequence import Bits

RING = 4
"""Number of steps whose timing events are kept: those of step N are read after N+1 was launched."""


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

    index: int
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
        sizes: Sizes,
        device: Device,
        on_idle: Callable[[IOSlot], None] | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.in_flight: Batch | None = None
        self.waiting_s = 0.0
        """CPU time spent on waiting for results."""
        self._on_idle = on_idle
        self._runner = runner
        self._device = device
        self._graphs: Graphs = graphs or NoGraphs()
        self._sampler = make_sampler(sizes.max_rows, sizes.vocab_size, device.memory)
        logits = sizes.max_rows + MAX_SCORES
        self._logits = torch.zeros(logits, sizes.vocab_size, device=device.memory)
        """float32 [R + MAX_SCORES, V]: written by the forward, read by sampling. Its address never
        changes, so that graphs can use it."""
        self._h2d, self._compute, self._d2h = (
            device.stream(name) for name in ("h2d", "compute", "d2h")
        )
        h2d, compute, d2h = self._h2d, self._compute, self._d2h
        self._lanes = [
            _Lane(
                index,
                IOSlot(sizes, device),
                h2d_done=device.event(h2d),
                mask_done=device.event(h2d),
                compute_done=device.event(compute),
                d2h_done=device.event(d2h),
            )
            for index in range(2)
        ]
        self._timings = [
            Timing(
                start=device.event(compute, timed=True),
                forward_end=device.event(compute, timed=True),
                sampling_start=device.event(compute, timed=True),
                end=device.event(compute, timed=True),
            )
            for _ in range(RING)
        ]
        device.settle()

    def capture(self) -> None:
        """Record the graphs, before the first step. Raises CaptureFailed."""
        for lane in self._lanes:
            self._h2d.run(lane.slot.upload)  # all padding so far
            lane.h2d_done.record()
            lane.h2d_done.block(self._compute)
        self._compute.run(lambda: self._graphs.capture(dict(self._captures())))
        self._lanes[0].compute_done.record()
        self._lanes[0].compute_done.synchronize()

    def launch(self, batch: Batch | None) -> None:
        """Enqueue a step up to its result, or up to its logits if a row is constrained."""
        self.in_flight = batch
        if batch is None:
            return
        lane, timing = self._lanes[batch.step % 2], self._timings[batch.step % RING]
        slot = lane.slot
        with self._device.span(f"launch {batch.step}"):
            slot.fill(batch, self._graphs.padded(len(batch.samples)))
            if batch.shaped_rows:
                self._h2d.run(slot.upload_shapes)
            self._h2d.run(slot.upload)
            # Producer: upload. Consumer: forward. Else it would read the inputs of step N-2.
            lane.h2d_done.record()
            lane.h2d_done.block(self._compute)
            timing.start.record()
            self._compute.run(lambda: self._compute_logits(batch, lane))
            timing.split = batch.constrained
            if not batch.constrained:
                self._sample(batch, lane, timing)

    def finish(self, batch: Batch | None, fill: Callable[[Batch, Bits], None]) -> None:
        """Constrained rows: build the masks while the forward runs, then enqueue the rest.

        Called after the previous step was settled, so that the masks see its tokens. fill: writes
        uint8 [S, V/8], one mask per sampling row.
        """
        if batch is None or not batch.constrained:
            return
        lane, timing = self._lanes[batch.step % 2], self._timings[batch.step % RING]
        timing.forward_end.record()
        with self._device.span(f"masks {batch.step}"):
            fill(batch, lane.slot.host_mask())
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
        with self._device.span(f"wait {batch.step}"):
            began = time.thread_time()
            lane.d2h_done.synchronize()
            self.waiting_s += time.thread_time() - began
        output = lane.slot.results(batch)
        if self.in_flight is batch:
            self.in_flight = None
        if self._on_idle is not None:
            self._on_idle(lane.slot)
        return output

    @property
    def graph_counts(self) -> Mapping[str, int]:
        """As `Graphs.counts`."""
        return self._graphs.counts

    def fit_report(self) -> str:
        """As `Graphs.fit_report`."""
        return self._graphs.fit_report()

    def timing(self, batch: Batch) -> list[tuple[int, int]]:
        """When the device computed a collected step: (start, end) pairs in ns."""
        return self._timings[batch.step % RING].intervals_ns()

    def padding(self, batch: Batch) -> int:
        """Rows that the forward of a step computes for nobody."""
        count = len(batch.samples)
        return self._graphs.padded(count) - count if batch.decodes_only else 0

    def is_replayed(self, batch: Batch) -> bool:
        """The forward of a step was recorded as a graph."""
        return batch.decodes_only and self._graphs.padded(len(batch.samples)) in self._graphs.sizes

    def close(self) -> None:
        """Let enqueued work end and give the streams up."""
        for stream in (self._h2d, self._compute, self._d2h):
            stream.close()

    def _compute_logits(self, batch: Batch, lane: _Lane) -> None:
        self._sampler.admit_rows(batch, lane.slot.device)
        key = self._forward_key(batch, lane)
        self._graphs.run(key, len(batch.samples), lambda: self._forward(batch, lane.slot))

    def _forward(self, batch: Batch, slot: IOSlot) -> None:
        input_ids = self._sampler.input_ids(batch, slot.device)
        logits = self._logits[: batch.num_logits]
        self._runner.forward(batch, input_ids, slot.device, logits)
        if scores := len(batch.scores):
            targets = slot.device["score_targets"][:scores]
            write_logprobs(
                logits[len(batch.samples) :], targets, *(slot.outputs[name] for name in SCORES)
            )

    def _sample(self, batch: Batch, lane: _Lane, timing: Timing) -> None:
        slot, count = lane.slot, len(batch.samples)
        if count:
            key = self._sampling_key(batch, lane)
            work = partial(self._choose, batch, slot)
            self._compute.run(lambda: self._graphs.run(key, count, work))
        if batch.logprobs:
            told = GraphKey("logprobs", lane.index, self._graphs.padded(count))
            work_of_logprobs = partial(self._tell, count, slot)
            self._compute.run(lambda: self._graphs.run(told, count, work_of_logprobs))
        timing.end.record()
        # Producer: sampling. Consumer: download. Else it would fetch the ids of step N-2.
        lane.compute_done.record()
        lane.compute_done.block(self._d2h)
        self._d2h.run(partial(slot.download, batch))
        lane.d2h_done.record()

    def _choose(self, batch: Batch, slot: IOSlot) -> None:
        count = len(batch.samples)
        mask = slot.mask[:count] if batch.constrained else None
        logits = self._logits[:count]
        ids = self._sampler.sample(batch, slot.device, logits, mask)
        slot.outputs["sampled"][:count] = ids

    def _tell(self, count: int, slot: IOSlot) -> None:
        """Log probabilities of what was sampled; sampling has left the logits alone."""
        sampled = slot.outputs["sampled"][:count]
        write_logprobs(self._logits[:count], sampled, *(slot.outputs[name] for name in LOGPROBS))

    def _captures(self) -> Iterator[tuple[GraphKey, Work]]:
        """What is recorded. Large sizes come first: others then fit into their memory."""
        for lane, size in product(self._lanes, sorted(self._graphs.sizes, reverse=True)):
            forward = GraphKey("forward", lane.index, size)
            yield forward, partial(self._forward, Batch.padding(size), lane.slot)
            for batch in (Batch.padding(size), Batch.padding(size, shaped=True)):
                sampling = self._sampling_key(batch, lane)
                assert sampling is not None
                yield sampling, partial(self._choose, batch, lane.slot)
            told = GraphKey("logprobs", lane.index, size)
            yield told, partial(self._tell, size, lane.slot)

    def _forward_key(self, batch: Batch, lane: _Lane) -> GraphKey | None:
        """None for steps with prompt chunks, whose shapes are too many to record."""
        if not batch.decodes_only:
            return None
        return GraphKey("forward", lane.index, self._graphs.padded(len(batch.samples)))

    def _sampling_key(self, batch: Batch, lane: _Lane) -> GraphKey | None:
        """None where a row is constrained: rare, and not worth twice the graphs."""
        if batch.constrained:
            return None
        kind: SamplingKind = "shaped" if batch.shaped or batch.held else "plain"
        return GraphKey("sampling", lane.index, self._graphs.padded(len(batch.samples)), kind)

"""The step loop: commands in, one report per step out.

The engine ties scheduler, pipeline and idle meter together. It knows requests and time, not
how a step is chosen (scheduler) nor how it reaches the device (pipeline).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from replica.attribution import attribute_time
from replica.config import EngineConfig
from replica.device.graph_pool import Graphs
from replica.device.stream import Device, HostDevice
from replica.idle import IdleMeter
from replica.io_slot import IOSlot, Sizes
from replica.messages import (
    Abort,
    Backlog,
    Command,
    Malformed,
    Output,
    Stats,
    StepLimits,
    StepReport,
    Stop,
    Submit,
    Trace,
)
from replica.model.runner import ModelRunner
from replica.pipeline import Pipeline
from replica.sampling.masks import MakesConstraints, MaskBuilder, constraint_of
from replica.scheduling.batch import Batch, StepOutput
from replica.scheduling.block_manager import BlockManager
from replica.scheduling.cost_fit import CostFit
from replica.scheduling.rows import Rows
from replica.scheduling.scheduler import Scheduler
from replica.scheduling.sequence import Key, Sequence
from replica.tracer import Tracer
from replica.validation import check_stops, check_submit
from replica.watchdog import Watchdog

IDLE_REPORT_S = 1.0
COMPILER_LOOK_S = 0.001
"""With nothing to compute, the engine waits so long at a time for a grammar that is being
compiled."""
REMEMBERED = 4096
"""How many keys of ended or aborted sequences are kept, so that a late submit of one is ignored."""


class Channel(Protocol):
    """The engine's side of the connection to its clients."""

    def receive(self, timeout_s: float) -> Iterable[Command | Malformed]:
        """What has come; waits for the first command at most `timeout_s`."""

    def send(self, report: StepReport) -> None: ...


class Engine:
    """One model on one device, driven by one thread that calls `advance` in a loop."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        channel: Channel,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        fit: CostFit | None = None,
        device: Device | None = None,
        graphs: Graphs | None = None,
        grammars: MakesConstraints | None = None,
        on_idle: Callable[[IOSlot], None] | None = None,
    ) -> None:
        """Raises ValueError if a sequence of `max_model_len` does not fit into the KV pool."""
        if max_model_len > config.num_blocks * config.block_size:
            raise ValueError(
                f"max_model_len is {max_model_len} tokens, but the KV pool holds only "
                f"{config.num_blocks * config.block_size}: raise engine.kv_tokens or lower "
                "engine.max_model_len"
            )
        self.config = config
        self._channel = channel
        self._device = device = device or HostDevice()
        self.max_model_len = max_model_len
        self._vocab_size = runner.vocab_size
        self._grammars = grammars
        self._eos_token_ids = eos_token_ids
        guard = config.num_blocks
        self.rows = Rows(config.max_rows, max_model_len, config.block_size, guard)
        self.scheduler = Scheduler(
            self.rows,
            BlockManager(config.num_blocks, config.block_size, prefix_cache=config.prefix_cache),
            max_step_tokens=config.max_step_tokens,
            step_budget_ms=config.step_budget_ms,
        )
        sizes = Sizes(
            max_rows=config.max_rows,
            max_step_tokens=config.max_step_tokens,
            table_width=self.rows.block_table.shape[1],
            vocab_size=runner.vocab_size,
            guard=guard,
            block_size=config.block_size,
        )
        self.pipeline = Pipeline(runner, sizes, device, on_idle, graphs)
        self.masks = MaskBuilder(self.rows)
        self.watchdog = Watchdog()
        self.tracer = Tracer(device)
        # Not a bound method: an engine that refers to itself keeps its device memory until some
        # garbage collection.
        self._step = Engine.step if config.overlap else Engine.step_synchronously
        self._over: OrderedDict[Key, None] = OrderedDict()
        self._refused: list[Output] = []
        self._surplus_ns = 0.0
        self._stopping = False
        self._fit = fit
        self._limits_s = np.zeros(len(StepLimits.__struct_fields__))
        self.start_over()

    def run(self) -> None:
        """Until a Stop was received and what it left to do is done. Raises EngineStalled."""
        while not (self._stopping and not self.busy):
            self.advance()
            waits = bool(self.rows.unready.any())  # for a compiler, which the front end has timed
            self.watchdog.check(self.scheduler.num_steps, self.stats, busy=self.busy and not waits)
        self.pipeline.close()

    def start_over(self) -> None:
        """Measure from now on: what came before was the start."""
        self.idle = IdleMeter(time.perf_counter_ns())
        self._limits_s[:] = 0.0
        self._compiled_at_start = self._device.num_compiled()
        if self._fit is not None:
            self.scheduler.cost = self._fit.model

    def advance(self) -> None:
        """One turn of the loop, of the kind that the configuration asks for."""
        self._step(self)
        self.tracer.end_turn()

    @property
    def busy(self) -> bool:
        """Something is to be scheduled, collected, released or reported."""
        return (
            self.scheduler.has_work
            or self.pipeline.in_flight is not None
            or bool(self._refused or self.scheduler.outputs or self.tracer.ended)
        )

    def step(self) -> None:
        """Prepare and launch a step while the one before it runs, then settle that one."""
        self._receive()
        batch = self._schedule()
        previous = self.pipeline.in_flight
        self.pipeline.launch(batch)
        output = self.pipeline.collect(previous)
        self._update(output)
        self.pipeline.finish(batch, self.masks.fill)
        self._emit(output)

    def step_synchronously(self) -> None:
        """The baseline: settle a step before the next is scheduled."""
        self._receive()
        batch = self._schedule()
        self.pipeline.launch(batch)
        self.pipeline.finish(batch, self.masks.fill)
        output = self.pipeline.collect(batch)
        self._update(output)
        self._emit(output)

    def _schedule(self) -> Batch | None:
        with self._device.span(f"schedule {self.scheduler.num_steps}"):
            batch = self.scheduler.schedule()
        if batch is not None and self.rows.untouched:
            self._touch(batch)
        if batch is None and self.pipeline.in_flight is None:
            self.rows.look_for_ready(COMPILER_LOOK_S)
        return batch

    def _touch(self, batch: Batch) -> None:
        """The wait of those is over whom this step is the first to compute for."""
        now = time.perf_counter_ns()
        for row in self.rows.untouched.intersection(batch.rows.tolist()):
            sequence = self.rows.sequence(row)
            sequence.queued_s = (now - sequence.received_ns) / 1e9
            self.rows.untouched.remove(row)

    def _update(self, output: StepOutput | None) -> None:
        if output is not None:
            self._book(output.batch)
        while self.masks.failures:
            self.scheduler.fail(*self.masks.failures.pop())
        with self._device.span(f"update {output.batch.step if output else ''}"):
            self.scheduler.update(output)

    def _book(self, batch: Batch) -> None:
        """Account for a step's time while its rows are as it left them."""
        intervals = self.pipeline.timing(batch)
        busy_ns = sum(self.idle.computed(*interval) for interval in intervals)
        replayed = self.pipeline.is_replayed(batch)
        self.tracer.computed(batch, intervals, self.idle.bubble_ns, replayed=replayed)
        self._surplus_ns += attribute_time(self.rows, batch, self.pipeline.padding(batch), busy_ns)
        if self._fit is None:
            return
        self._limits_s += self._fit.limits(batch) * (busy_ns / 1e9)
        if not batch.decodes_only:
            self._fit.observe(batch, busy_ns / 1e6)
            self.scheduler.cost = self._fit.model

    # Commands

    def _receive(self) -> None:
        commands = self._channel.receive(0.0 if self.busy else IDLE_REPORT_S)
        with self._device.span("receive"):
            for command in commands:
                self._handle(command)

    def _handle(self, command: Command | Malformed) -> None:
        match command:
            case Submit() | Malformed():
                self._submit(command)
            case Abort():
                self._abort((command.request_id, command.attempt))
            case Backlog():
                self.idle.backlog_changed(command.waiting, time.perf_counter_ns())
            case Stop():
                self._stopping = True
                if not command.drain:
                    self.scheduler.abort_all()
            case Trace():
                self.tracer.start(command, self.scheduler.num_steps, self.idle.bubble_ns)

    def _submit(self, submit: Submit | Malformed) -> None:
        """A repeated submit, or one that its own abort has overtaken, starts nothing."""
        key = submit.request_id, submit.attempt
        if key in self.scheduler or key in self._over:
            return
        try:
            sequence = self._sequence(submit)
        except ValueError as error:
            self._refuse(submit, str(error))
            return
        sequence.received_ns = time.perf_counter_ns()
        self.idle.work_arrived(sequence.received_ns)
        self.tracer.arrived(key)
        self.scheduler.add(sequence)
        if key not in self.scheduler:  # complete already: its end is told with the next report
            self._remember(key)

    def _sequence(self, submit: Submit | Malformed) -> Sequence:
        """Raises ValueError if it can never run."""
        if self._stopping:
            raise ValueError("the replica is shutting down")
        if isinstance(submit, Malformed):
            raise ValueError(submit.reason)
        check_submit(submit, self._vocab_size, self.max_model_len)
        sequence = Sequence.from_submit(
            submit, max_model_len=self.max_model_len, eos_token_ids=self._eos_token_ids
        )
        check_stops(submit.sampling, sequence.stop_ids)
        sequence.constraint = constraint_of(
            submit.sampling, sequence.stop_ids, self._vocab_size, self._grammars
        )
        return sequence

    def _abort(self, key: Key) -> None:
        self.scheduler.abort(key)
        self._remember(key)

    def _refuse(self, submit: Submit | Malformed, reason: str) -> None:
        self._refused.append(
            Output(submit.request_id, submit.attempt, 0, (), "error", error=reason)
        )
        self._remember((submit.request_id, submit.attempt))

    def _remember(self, key: Key) -> None:
        self._over[key] = None
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    # Reports

    def _emit(self, output: StepOutput | None) -> None:
        """One report per collected step, and one a second when there is nothing to do."""
        if not self.scheduler.has_work:
            self.idle.work_ended()
        outputs = self._refused + self.scheduler.take_outputs()
        self._refused = []
        for ended in outputs:
            if ended.finish_reason is not None:
                self._remember((ended.request_id, ended.attempt))
        with self._device.span(f"deliver {output.batch.step if output else ''}"):
            traced = self.tracer.delivered(output, outputs)
            if outputs or traced or output is not None or not self.busy:
                stats = self.stats()
                self._channel.send(StepReport(outputs=outputs, stats=stats, traced=traced))

    def stats(self) -> Stats:
        self.idle.book_idle(time.perf_counter_ns())
        scheduler, counts = self.scheduler, self.scheduler.counts
        graphs = self.pipeline.graph_counts
        return Stats(
            running=self.rows.num_used,
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.blocks.num_free,
            steps=scheduler.num_steps,
            prompt_tokens=counts["prompt_tokens"],
            cached_tokens=counts["cached_tokens"],
            output_tokens=counts["output_tokens"],
            surplus_rows=counts["surplus_rows"],
            preemptions=counts["preemptions"],
            finished=dict(scheduler.finished),
            time=self.idle.time(self._surplus_ns),
            limits=StepLimits(*self._limits_s.tolist()),
            host_s=time.thread_time() - self.pipeline.waiting_s,
            graph_replays=graphs["replays"],
            eager_parts=graphs["eager"],
            padding_rows=graphs["padding"],
            kv_slots=int(self.rows.num_blocks.sum()) * self.rows.block_size,
            kv_tokens=int(self.rows.scheduled.sum()),
            compiled=self._device.num_compiled() - self._compiled_at_start,
        )

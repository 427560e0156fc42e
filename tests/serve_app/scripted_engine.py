"""A scripted engine behind the signature of `EngineClient`: known tokens, one per step.

Its tokens depend on the request and the position alone, as the real engine's do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from replica.client import EngineClient, EngineFailed
from replica.config import EngineConfig
from replica.messages import (
    Abort,
    Command,
    FinishReason,
    Output,
    Ready,
    Stats,
    StepReport,
    Submit,
    Trace,
    Traced,
    TraceOutcome,
)
from replica.timeline.engine_trace import DeviceTrace, EngineTrace

Key = tuple[str, int]

STEP_GPU_S = 0.25
"""What each token takes of the device's time, by the script."""


def token(request_id: str, position: int) -> int:
    return (sum(request_id.encode()) + position) % 200


def tokens(request_id: str, count: int) -> tuple[int, ...]:
    """The whole output of a request."""
    return tuple(token(request_id, position) for position in range(count))


def bill(submit: Submit, position: int) -> float:
    """GPU seconds by the end of the step that gives the token at `position`."""
    return STEP_GPU_S * (position + 1 - len(submit.prior_output_ids))


class ScriptedEngine(EngineClient):
    """`config.model` may be "fails" (it does not start) or a number: seconds per step."""

    def __init__(self, config: EngineConfig) -> None:
        self.ready = Ready(
            model_type="script",
            vocab_size=256,
            eos_token_ids=(255,),
            max_model_len=1024,
            max_rows=config.max_rows,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
        )
        self.starting_s = 0.0
        self.running: dict[Key, tuple[Submit, int]] = {}
        self.known: set[Key] = set()
        self.commands: list[Command] = []
        self.queued_s = 0.0
        """What it says of the wait of each sequence."""
        self._step_s = float(config.model)
        self.traces: list[Trace] = []
        """Ordered, and not ended."""
        self._traced: tuple[Traced, ...] = ()
        self._aborted: list[Output] = []
        self._given_up: dict[str, str] = {}
        self._failure = ""
        self._news = asyncio.Event()

    @property
    def pid(self) -> int:
        """Of no process."""
        return 0

    @classmethod
    async def start(cls, config: EngineConfig) -> ScriptedEngine:
        if config.model == "fails":
            raise EngineFailed("no such model")
        return cls(config)

    def send(self, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, Submit):
            key = (command.request_id, command.attempt)
            if key not in self.known:
                self.known.add(key)
                self.running[key] = (command, len(command.prior_output_ids))
        elif isinstance(command, Abort):
            key = (command.request_id, command.attempt)
            self.known.add(key)
            if (run := self.running.pop(key, None)) is not None:
                self._aborted.append(Output(*key, 0, (), "abort", gpu_s=bill(*run)))
        elif isinstance(command, Trace):
            self.traces.append(command)
        self._news.set()

    def trace(self, outcome: TraceOutcome = "written") -> None:
        """End the traces that were ordered. There is nothing in them."""
        for one in self.traces:
            if outcome == "written":
                EngineTrace("cpu", 0, 1, DeviceTrace([]), [], [], 0).write(Path(one.folder))
            self._traced += (Traced(folder=one.folder, outcome=outcome),)
        self.traces = []
        self._news.set()

    def give_up(self, request_id: str, error: str) -> None:
        """End a sequence for a reason of the engine's own."""
        self._given_up[request_id] = error

    def die(self, reason: str = "killed by the test") -> None:
        self._failure = reason
        self._news.set()

    async def events(self) -> AsyncIterator[StepReport]:
        while not self._failure:
            if not self.running and not self._aborted:
                self._news.clear()
                try:
                    await asyncio.wait_for(self._news.wait(), 1.0)
                except asyncio.TimeoutError:
                    yield StepReport(outputs=[], stats=Stats())
            await asyncio.sleep(self._step_s)
            if not self._failure:
                traced, self._traced = self._traced, ()
                yield StepReport(outputs=self._step(), stats=Stats(), traced=traced)
        raise EngineFailed(self._failure)

    async def close(self, grace_s: float = 2.0) -> None:
        self.die("closed")

    def _step(self) -> list[Output]:
        outputs, self._aborted = self._aborted, []
        for key, (submit, position) in list(self.running.items()):
            if key[0] in self._given_up:
                error = self._given_up.pop(key[0])
                outputs.append(Output(*key, position, (), "error", error=error))
                del self.running[key]
                continue
            last = position + 1 >= submit.sampling.max_tokens
            reason: FinishReason | None = "length" if last else None
            ids = (token(key[0], position),)
            gpu_s, queued_s = bill(submit, position), self.queued_s
            outputs.append(Output(*key, position, ids, reason, gpu_s=gpu_s, queued_s=queued_s))
            self.running[key] = (submit, position + 1)
            if last:
                del self.running[key]
        return outputs

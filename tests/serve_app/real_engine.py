"""A `Backend` over a real engine in this process: no Ray, no router, everything else as it is."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterable

import torch

from replica.engine import Engine
from replica.messages import Abort, Command, Output, StepReport, Stop, Submit
from serve_app.protocol.backend import Delta, EngineFailure, Generation, ServedModel


class QueueChannel:
    """Commands from any thread; outputs to whoever asked, on its event loop."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.readers: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Output]]] = {}

    def receive(self, timeout_s: float) -> Iterable[Command]:
        try:
            yield self.commands.get(timeout=timeout_s) if timeout_s else self.commands.get_nowait()
            while True:
                yield self.commands.get_nowait()
        except queue.Empty:
            return

    def send(self, report: StepReport) -> None:
        for output in report.outputs:
            if (reader := self.readers.get(output.request_id)) is not None:
                loop, outputs = reader
                loop.call_soon_threadsafe(outputs.put_nowait, output)


class RealEngine:
    """Implements `Backend`; has the fields that a `Site` looks at."""

    def __init__(self, engine: Engine, channel: QueueChannel, model: ServedModel) -> None:
        self.running = 0
        self.outcomes: Counter[str] = Counter()
        self._engine, self._channel, self.model_ = engine, channel, model
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def reset(self) -> None:
        """Nothing of a test is kept."""

    def _run(self) -> None:
        with torch.inference_mode():
            self._engine.run()

    def close(self) -> None:
        self._channel.commands.put(Stop(drain=False))
        self._thread.join(timeout=20)

    async def check_ready(self) -> None:
        await self.model()

    async def model(self) -> ServedModel:
        return self.model_

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        name, channel = generation.request_id, self._channel
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        channel.readers[name] = (asyncio.get_running_loop(), outputs)
        channel.commands.put(
            Submit(request_id=name, prompt_ids=generation.prompt_ids, sampling=generation.sampling)
        )
        self.running += 1
        try:
            while True:
                output = await outputs.get()
                if output.error:
                    raise EngineFailure(output.error)
                yield Delta(
                    output.token_ids,
                    output.finish_reason,
                    output.cached_tokens,
                    output.logprobs,
                    output.prompt_logprobs,
                )
                if output.finish_reason is not None:
                    return
        finally:
            self.running -= 1
            channel.commands.put(Abort(request_id=name))
            del channel.readers[name]

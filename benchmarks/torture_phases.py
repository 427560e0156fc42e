"""What an engine goes through. Each phase takes until a time (`time.perf_counter`), at least once
through, and leaves the engine with nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count, pairwise
from random import Random
from typing import TypeAlias

from benchmarks.torture_checks import Asked
from benchmarks.torture_engine import Driven
from benchmarks.torture_traffic import LONGEST_OUTPUT, Traffic
from replica.config import EngineConfig
from replica.scheduling.cost_fit import predicted_ms, step_work

Phase: TypeAlias = Callable[[Driven, Random, float], None]
STREAMS = 8
LONG = 11 / 12
"""Share of the context that a long prompt takes: 120k of 131,072 tokens."""
LEAST_CHUNKS = 20


def lengths(config: EngineConfig) -> tuple[int, ...]:
    """Of prompts: ends of blocks, of kernels' tiles, and of a step."""
    step = config.max_step_tokens
    return 1, 2, 63, 64, 65, step - 1, step, step + 1, 3 * step


def prompts(driven: Driven, random: Random, until: float) -> None:
    """Of every critical length, alone, from the cache, and in company."""
    while True:
        asked = [(_ids(driven, random, length), length) for length in lengths(driven.config)]
        alone = []
        for prompt, length in asked:
            alone.append(driven.answer(prompt).ids)
            _same(driven, alone[-1], driven.answer(prompt).ids, f"{length} tokens, asked again")
        company = Company(driven, random)
        for (prompt, length), ids in zip(asked, alone, strict=True):
            company.renew()
            _same(driven, ids, driven.answer(prompt).ids, f"{length} tokens, in company")
            driven.answer(_ids(driven, random, length))
        company.leave()
        driven.drain()
        if time.perf_counter() > until:
            return


def ample_traffic(driven: Driven, random: Random, until: float) -> None:
    """All parameters at random, with aborts, while there is room for all."""
    _traffic(driven, random, until, _longest(driven.config))


def tight_traffic(driven: Driven, random: Random, until: float) -> None:
    """Prompts of less than a step, with room for one of the longest: rows are preempted."""
    longest = driven.config.max_step_tokens // 4
    before = driven.engine.scheduler.counts["preemptions"]
    with driven.tight(longest + LONGEST_OUTPUT):
        _traffic(driven, random, until, longest)
    preempted = driven.engine.scheduler.counts["preemptions"] - before
    driven.record.preemptions += preempted
    if not preempted:
        driven.record.fail("nothing was preempted, although there was little room")


def beside_a_long_prompt(driven: Driven, random: Random, until: float) -> None:
    """How long a stream stands still while a prompt of nearly the whole context is computed."""
    while True:
        company = Company(driven, random)
        driven.record.gaps_ms.append(_longest_gap_ms(driven, random, company.streams[-1]))
        company.leave()
        driven.drain()
        if time.perf_counter() > until:
            return


def costs(driven: Driven, random: Random, until: float) -> None:
    """Predicted and real time of prompt chunks of any size at any depth, one to a step."""
    base = _long_prompt(driven, random)
    _time_chunks(driven, base)
    for number in count():
        if number >= LEAST_CHUNKS and time.perf_counter() > until:
            break
        size = int(driven.config.max_step_tokens ** random.random()) + 1
        depth = random.randrange(len(base) - size)
        _time_chunks(driven, base[:depth] + _ids(driven, random, size))
    driven.drain()


PHASES: dict[str, tuple[Phase, float]] = {
    "prompts": (prompts, 0.15),
    "ample_traffic": (ample_traffic, 0.3),
    "tight_traffic": (tight_traffic, 0.3),
    "beside_a_long_prompt": (beside_a_long_prompt, 0.1),
    "costs": (costs, 0.15),
}
"""With the share of the time that each gets."""


class Company:
    """Streams that decode for as long as there is room for their tokens."""

    def __init__(self, driven: Driven, random: Random) -> None:
        self._driven, self._random = driven, random
        self.streams: list[Asked] = []
        self.renew()

    def renew(self) -> None:
        """Start those that are missing or have come to their end."""
        self.streams = [stream for stream in self.streams if stream.reason is None]
        while len(self.streams) < STREAMS:
            prompt = _ids(self._driven, self._random, self._random.randint(1, 100))
            room = self._driven.engine.max_model_len
            self.streams.append(self._driven.ask(prompt, max_tokens=room, temperature=1.0))

    def leave(self) -> None:
        for stream in self.streams:
            self._driven.abort(stream)


def _traffic(driven: Driven, random: Random, until: float, longest: int) -> None:
    config, alive = driven.config, driven.checks.alive
    context = driven.engine.max_model_len
    traffic = Traffic(random, driven.names, driven.spec.vocab_size, context, longest)
    wanted = config.max_rows * 5 // 4
    while True:
        while len(alive) < wanted:
            _send_one(driven, random, traffic)
        driven.step()
        if time.perf_counter() > until:
            break
    driven.drain()


def _send_one(driven: Driven, random: Random, traffic: Traffic) -> None:
    kind = random.random()
    if kind < 0.02:
        driven.send(traffic.refusal(), refused=True)
    elif kind < 0.03:
        driven.send_overtaken(traffic.request())
    else:
        driven.send(traffic.request(), times=2 if kind < 0.05 else 1)
    if random.random() < 0.1:
        driven.abort(random.choice(list(driven.checks.alive.values())))


def _longest_gap_ms(driven: Driven, random: Random, watched: Asked) -> float:
    driven.step_until(lambda: len(watched.ids) > 0)
    long = driven.ask(_long_prompt(driven, random), max_tokens=1)
    came, seen = [time.perf_counter()], len(watched.ids)
    while long.reason is None and watched.reason is None:
        driven.step()
        if len(watched.ids) > seen:
            seen = len(watched.ids)
            came.append(time.perf_counter())
    came.append(time.perf_counter())
    return max(after - before for before, after in pairwise(came)) * 1e3


def _longest(config: EngineConfig) -> int:
    return 3 * config.max_step_tokens


def _ids(driven: Driven, random: Random, length: int) -> tuple[int, ...]:
    return tuple(random.choices(range(driven.spec.vocab_size), k=length))


def _long_prompt(driven: Driven, random: Random) -> tuple[int, ...]:
    return _ids(driven, random, int(driven.engine.max_model_len * LONG))


def _same(driven: Driven, one: list[int], other: list[int], what: str) -> None:
    if driven.exact and one != other:
        driven.record.fail(f"another answer to the same prompt of {what}: {one} and {other}")


def _time_chunks(driven: Driven, prompt: tuple[int, ...]) -> None:
    """Ask for one token. Every step is a chunk of that prompt alone."""
    engine = driven.engine
    asked, predicted = driven.ask(prompt, max_tokens=1), 0.0
    while asked.reason is None:
        cost = engine.scheduler.cost
        collected = driven.step()
        if collected is not None and collected.num_tokens > 1:
            spans = engine.pipeline.timing(collected)
            real = sum(end - start for start, end in spans) / 1e6
            driven.record.costs.append((predicted, real))
        launched = engine.pipeline.in_flight
        if launched is not None:
            predicted = predicted_ms(cost, step_work(launched.starts, launched.lengths))

"""Runs an engine before it is offered to anybody: first calls are slow, and steps are timed.

Every kind of step is taken once (prompt chunk, full batch, greedy, filtered, shaped, held,
masked), so that no client pays for it, and the cost model of prompt chunks is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from replica.budget import CostModel
from replica.config import EngineConfig
from replica.engine import Channel, Engine
from replica.messages import Command, Sampling, StepReport, Stop, Submit

MAX_PROMPT = 1024


class Replay:
    """A channel that plays a list of commands and drops the reports."""

    def __init__(self, commands: list[Command]) -> None:
        self._commands = commands

    def receive(self, timeout_s: float) -> Iterable[Command]:
        commands, self._commands = self._commands, []
        return commands

    def send(self, report: StepReport) -> None:
        pass


def _run(make_engine: Callable[[Channel], Engine], commands: list[Submit]) -> float:
    """Busy seconds of an engine that does just this."""
    engine = make_engine(Replay([*commands, Stop()]))
    engine.run()
    return engine.stats().busy_s


def _prompt(name: str, length: int, sampling: Sampling) -> Submit:
    return Submit(request_id=name, prompt_ids=(1,) * length, sampling=sampling)


def warm_up(
    config: EngineConfig, max_model_len: int, make_engine: Callable[[Channel], Engine]
) -> CostModel:
    """Take every kind of step once. Returns what prompt chunks cost, for the step budget."""
    longest = min(MAX_PROMPT, max_model_len - 4)
    short = max(1, longest // 8)
    kinds = [
        Sampling(max_tokens=3, temperature=0.0),
        Sampling(max_tokens=3, top_k=5, top_p=0.9, min_tokens=2),
        Sampling(max_tokens=3, allowed_token_ids=(0, 1, 2)),
        Sampling(max_tokens=3, presence_penalty=0.5, logit_bias=((0, 1.0),), logprobs=1),
    ]
    rows = [_prompt(str(i), 4, kinds[i % len(kinds)]) for i in range(config.max_rows)]
    _run(make_engine, [command for command in rows if max_model_len > 8])
    one = Sampling(max_tokens=1, temperature=0.0)
    brief, long = (
        min(_run(make_engine, [_prompt("timed", length, one)]) for _ in range(2))
        for length in (short, longest)
    )
    return _fit(short, brief * 1e3, longest, long * 1e3)


def _fit(short: int, short_ms: float, longest: int, long_ms: float) -> CostModel:
    """Solve ms = token_ms * n + pair_ms * n^2 / 2 for two prompt lengths."""
    if longest <= short:
        return CostModel(token_ms=short_ms / short)
    pair_ms = 2 * (long_ms / longest - short_ms / short) / (longest - short)
    pair_ms = max(0.0, pair_ms)
    return CostModel(token_ms=long_ms / longest - pair_ms * longest / 2, pair_ms=pair_ms)

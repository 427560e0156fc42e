"""On and off on a live server: one tenant sends all the time, the other in bursts with silences.

The server has few rows and answers are short, so that the bound of docs/fairness.md is narrow: a
burst would overstep it if requests were served as they come, or if silence were saved up. Service
is what clients see: a prompt with the first token of its answer, output as it arrives.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from openai import AsyncOpenAI
from openai.types import Completion

from benchmarks.client import Answer, Flood, stream
from benchmarks.report import Report
from benchmarks.server import Server, serving
from router.policy import FairPolicy
from serve_app.settings import AppConfig

CONFIG = Path(__file__).with_suffix(".yaml")
STEADY, BURSTS = "demo-steady", "demo-bursts"
OPEN_REQUESTS = {STEADY: 12, BURSTS: 36}
"""Several times the rows, so that something waits whatever is on its way."""
PROMPT_TOKENS = 8
ANSWER_TOKENS = (6, 8, 10, 12)
"""In turn: equal ones would all end in the same step."""
SILENCE, BURST = 1.5, 3.0
"""How long they last, in service by the bound. Requests served as they come would let a burst have
1.5 times the bound more than the steady tenant, and so would a silence that was saved up."""
STALLED_S = 60.0
Series = NDArray[np.float64]


def settings(config: Path) -> AppConfig:
    [application] = yaml.safe_load(config.read_text())["applications"]
    return AppConfig.model_validate(application["args"])


def bound(config: AppConfig) -> float:
    """That of docs/fairness.md for two tenants of weight 1, without a prefix cache, as clients see
    it: all that one has in flight may be charged, or expected, and not seen yet."""
    policy, [model] = config.fairness, config.served
    in_flight = model.engine.max_rows + model.lookahead_credits
    prompt, answer = policy.w_p * PROMPT_TOKENS, policy.w_q * max(ANSWER_TOKENS)
    ahead = prompt + in_flight * answer
    unseen = in_flight * (prompt + answer)
    return 2 * (policy.locality + ahead + unseen) + policy.burst


@dataclass
class Meter:
    """What was served to whom, and when: the cost of what clients saw, as it came."""

    policy: FairPolicy
    model: str
    seen: list[tuple[float, str, float]] = field(default_factory=list)
    total: float = 0.0
    more: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, client: AsyncOpenAI, turn: int) -> Answer:
        begun = False

        def notice(event: Completion) -> None:
            nonlocal begun
            tokens = sum(len(each.logprobs.tokens or ()) for each in event.choices if each.logprobs)
            if tokens:
                prompt = 0.0 if begun else self.policy.w_p * PROMPT_TOKENS
                cost = prompt + self.policy.w_q * tokens
                self._add(client.api_key, cost)
                begun = True

        prompt = [100 + turn % 1000] * PROMPT_TOKENS
        length = ANSWER_TOKENS[turn % len(ANSWER_TOKENS)]
        # A chunk may bring several tokens: log probabilities tell how many.
        return await stream(client, self.model, prompt, length, notice, logprobs=0)

    async def until_served(self, amount: float) -> None:
        """Wait until as much more was served to both together. Raises TimeoutError if it stalls."""
        goal = self.total + amount
        while self.total < goal:
            self.more.clear()
            await asyncio.wait_for(self.more.wait(), STALLED_S)

    def course(self, start: float, end: float) -> tuple[Series, Series]:
        """Service from `start` on of the steady tenant and of the other, at each moment of it."""
        inside = [(key, cost) for when, key, cost in self.seen if start <= when < end]
        owners, costs = [key for key, _ in inside], np.array([0.0, *(cost for _, cost in inside)])
        steady = np.array([False, *(key == STEADY for key in owners)])
        return np.cumsum(costs * steady), np.cumsum(costs * ~steady)

    def _add(self, key: str, cost: float) -> None:
        self.seen.append((time.monotonic(), key, cost))
        self.total += cost
        self.more.set()


def largest_difference(steady: Series, bursts: Series) -> float:
    """Of the two services, over all windows: the rise and fall of the lead."""
    lead = bursts - steady
    return float(lead.max() - lead.min())


async def on_and_off(
    server: Server, meter: Meter, allowed: float, runs: int
) -> list[tuple[float, float]]:
    """Beginning and end of each burst. Both tenants have something waiting throughout."""

    def flood(key: str) -> Flood:
        return Flood(server.base_url, key, OPEN_REQUESTS[key], meter.ask)

    spans = []
    async with flood(STEADY):
        for _ in range(runs):
            await meter.until_served(SILENCE * allowed)
            start = time.monotonic()
            async with flood(BURSTS):
                await meter.until_served(BURST * allowed)
                spans.append((start, time.monotonic()))
    return spans


def measure(report: Report, runs: int) -> None:
    """Add the figures: a run is a silence and a burst."""
    config = settings(CONFIG)
    allowed = report.figures["live_on_off_bound"] = bound(config)
    with serving(CONFIG) as server:
        meter = Meter(config.fairness, server.model)
        spans = asyncio.run(on_and_off(server, meter, allowed, runs))
    shares = []
    for run, span in enumerate(spans):
        steady, bursts = meter.course(*span)
        shares.append(float(steady[-1] / (steady[-1] + bursts[-1])))
        report.add(f"live_on_off_diff.run{run}", [largest_difference(steady, bursts)])
    report.add("live_on_off_share", shares)

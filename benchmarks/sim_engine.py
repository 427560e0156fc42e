"""A replica in token steps: rows, chunked prompts, a prefix cache, and time by a cost model.

Each step gives every row that has its prompt one token, and works on waiting prompts in the order
in which they came, up to `chunk` tokens. It knows neither tenants' weights nor policies; what is
taken into the rows is decided by a `Policy`.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """How long a step takes: base + rows * per_row + prompt tokens * per_prompt_token."""

    rows: int = 20
    base_s: float = 0.030
    per_row_s: float = 0.0002
    per_prompt_token_s: float = 0.00015
    chunk: int = 512
    kv_tokens: int = 0
    """What running requests leave of it keeps shared prefixes, the least recently used out first;
    with 0 there is no cache."""


@dataclass(slots=True, eq=False)
class Job:
    """A request; compared and hashed by identity."""

    id: str
    tenant: str
    arrival: float
    prompt: int
    output: int
    max_tokens: int = 0
    """What the router is told; the true length by default."""
    prefix: int = 0
    """Which shared beginning the prompt has, 0 for none."""
    prefix_tokens: int = 0
    ingress: int = 0
    cached: int = 0
    produced: int = 0
    left: int = 0
    """Prompt tokens still to be computed."""
    granted: float = 0.0
    first: float = 0.0
    """When its first token came."""

    @property
    def limit(self) -> int:
        return self.max_tokens or self.output


class Policy(Protocol):
    """Who gets a free row."""

    def add(self, job: Job, now: float) -> bool:
        """A request came. False if it is refused."""

    def fill(self, now: float) -> list[Job]:
        """Take waiting requests into free rows."""

    def produced(self, job: Job) -> None:
        """`job.produced` and `job.cached` have changed."""

    def end(self, job: Job) -> None:
        """All tokens are out; its row is free."""


Observer = Callable[[float], None]


class Simulation:
    """Runs one policy on one replica. Arrivals come in the order of their times."""

    def __init__(
        self,
        model: EngineModel,
        policy: Policy,
        arrivals: Iterable[Job],
        on_end: Callable[[Job, float], Iterable[Job]] = lambda job, now: (),
        on_step: Observer = lambda now: None,
    ) -> None:
        """`on_end` returns what its tenant sends next; `on_step` sees the time advance."""
        self.now = 0.0
        self.refused: list[Job] = []
        self._model, self._policy = model, policy
        self._arrivals: Iterator[Job] = iter(arrivals)
        self._next = next(self._arrivals, None)
        self._on_end, self._on_step = on_end, on_step
        self._prompts: deque[Job] = deque()
        self._finishing: list[tuple[int, str, Job]] = []
        """By the step in which the last token comes."""
        self._decoding: dict[Job, int] = {}
        """And the step in which each began to decode."""
        self._step = 0
        self._cache: OrderedDict[int, int] = OrderedDict()
        """Tokens of each cached prefix."""
        self._private = 0
        """Tokens that running requests share with nobody."""

    def run(self, until: float) -> None:
        while self.now < until:
            self._take_arrivals()
            for job in self._policy.fill(self.now):
                self._start(job)
            if self._prompts:
                self._prompt_step()
            elif self._decoding:
                self._decode_steps(until)
            elif self._next is not None and self._next.arrival < until:
                self.now = self._next.arrival
            else:
                return
            self._on_step(self.now)

    def submit(self, job: Job) -> None:
        if not self._policy.add(job, self.now):
            self.refused.append(job)

    def is_cached(self, job: Job) -> bool:
        return job.prefix in self._cache

    def _evict(self) -> None:
        room = self._model.kv_tokens - self._private
        while self._cache and sum(self._cache.values()) > room:
            self._cache.popitem(last=False)

    def _take_arrivals(self) -> None:
        while self._next is not None and self._next.arrival <= self.now:
            self.submit(self._next)
            self._next = next(self._arrivals, None)

    def _start(self, job: Job) -> None:
        job.granted = self.now
        if self.is_cached(job):
            job.cached = job.prefix_tokens
        self._private += job.prompt - job.prefix_tokens + job.output
        if job.prefix:
            self._cache[job.prefix] = job.prefix_tokens
            self._cache.move_to_end(job.prefix)
            self._evict()
        job.left = job.prompt - job.cached
        self._prompts.append(job)

    def _prompt_step(self) -> None:
        """The step that ends a prompt gives its first token."""
        budget, done = self._model.chunk, []
        while self._prompts and budget:
            job = self._prompts[0]
            taken = min(job.left, budget)
            job.left -= taken
            budget -= taken
            if not job.left:
                done.append(self._prompts.popleft())
        self._advance(1, self._model.chunk - budget)
        for job in done:
            job.first = self.now
            self._decoding[job] = self._step
            heapq.heappush(self._finishing, (self._step + job.output - 1, job.id, job))
        self._settle()

    def _decode_steps(self, until: float) -> None:
        """As many steps at once as pass without an event."""
        steps = max(self._finishing[0][0] - self._step, 1)
        horizon = until if self._next is None else min(self._next.arrival, until)
        within = math.ceil((horizon - self.now) / self._step_s(0))
        self._advance(max(min(steps, within), 1), 0)
        self._settle()

    def _advance(self, steps: int, prompt_tokens: int) -> None:
        self._step += steps
        self.now += steps * self._step_s(prompt_tokens)

    def _step_s(self, prompt_tokens: int) -> float:
        model = self._model
        rows = len(self._decoding)
        return model.base_s + rows * model.per_row_s + prompt_tokens * model.per_prompt_token_s

    def _settle(self) -> None:
        """Report what was produced; end what is over."""
        for job, began in self._decoding.items():
            job.produced = self._step - began + 1
            self._policy.produced(job)
        while self._finishing and self._finishing[0][0] <= self._step:
            _, _, job = heapq.heappop(self._finishing)
            del self._decoding[job]
            self._private -= job.prompt - job.prefix_tokens + job.output
            self._policy.end(job)
            for another in self._on_end(job, self.now):
                self.submit(another)

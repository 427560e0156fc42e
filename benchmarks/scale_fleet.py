"""A fleet of replicas under load, second by second, for as many replicas as one likes.

Requests of one tenant that arrive in the same second are one cohort; cohorts are divided, not
requests. The router is taken as ideal: room anywhere is room for whoever comes next, and tenants
share it evenly. The engine is a model with the H200's measured step times
(benchmarks/results/peers.json). It knows no policy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ROWS = 128
"""Sequences that a replica runs at once ..."""
KV_TOKENS = 500_000
"""... and the tokens of them that it holds."""
FIXED_S, ROW_S, CONTEXT_S = 4.1e-3, 8.5e-6, 2.9e-8
"""A decode step: FIXED + ROW * rows + CONTEXT * tokens held."""
PREFILL_S = 33e-6
"""A prompt token."""
PREFILL_SHARE = 0.5
"""Of the time while something decodes: a prompt never stalls the others."""
TTFT_S, TPOT_S = 3.0, 0.06
"""What is promised: seconds to the first token, and for each that follows."""
DRAIN_S = 15
DONE = 1e-9
COLUMNS = 6
TENANT, COUNT, ARRIVED, PROMPT, OUTPUT, FIRST = range(COLUMNS)
"""Of a cohort: whose, how many, when, prompt tokens to compute, output to come, first token at."""


@dataclass(frozen=True, slots=True)
class Tenant:
    prompt: int
    output: int
    max_concurrency: float = np.inf

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    @property
    def gpu_s(self) -> float:
        """Of one request, on a replica that is full of such requests."""
        rows = min(ROWS, KV_TOKENS / self.tokens)
        return self.prompt * PREFILL_S + self.output * step_s(rows, rows * self.tokens) / rows


def step_s(rows: float, tokens: float) -> float:
    return FIXED_S + ROW_S * rows + CONTEXT_S * tokens


class Observed(NamedTuple):
    """Of the whole fleet in one second; shares are means over its replicas."""

    busy: float
    work: float
    rows: float
    kv: float
    waiting: float
    """Requests that would run if there were room."""
    backlog_s: float
    ongoing: float
    """Requests that wait, whatever for, and that run: what counting requests counts."""


@dataclass(slots=True)
class Counts:
    good: float = 0.0
    missed: float = 0.0
    replica_s: float = 0.0


@dataclass(slots=True)
class Fleet:
    tenants: tuple[Tenant, ...]
    start_s: int
    ready: int
    target: int
    counts: Counts = field(default_factory=Counts)
    _starting: list[float] = field(default_factory=list)
    _draining: deque[float] = field(default_factory=deque)
    _queues: list[deque[list[float]]] = field(init=False)
    _run: Array = field(default_factory=lambda: np.zeros((0, COLUMNS)))
    _gpu_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._queues = [deque() for _ in self.tenants]
        self._gpu_s = [tenant.gpu_s for tenant in self.tenants]

    def scale(self, target: int, now: float) -> None:
        """Start or end replicas; those that still start go first."""
        self.target = target
        while self._starting and self.ready + len(self._starting) > target:
            self._starting.pop()
        while self.ready > target:
            self.ready -= 1
            self._draining.append(now + DRAIN_S)

    def kill(self, count: int) -> None:
        """Replicas die; what ran there goes on elsewhere, and computes its tokens again."""
        count = min(count, self.ready)
        if not count:
            return
        share = count / (self.ready + len(self._draining))
        self.ready -= count
        for cohort in self._run:
            lost = cohort.copy()
            lost[COUNT] *= share
            tenant = self.tenants[int(lost[TENANT])]
            lost[PROMPT] = tenant.tokens - lost[OUTPUT]
            self._queues[int(lost[TENANT])].appendleft(list(lost))
        self._run[:, COUNT] *= 1 - share

    def step(self, arrivals: NDArray[np.int64], now: float) -> Observed:
        """One second."""
        self._replace(now)
        for index, count in enumerate(arrivals):
            if count:
                tenant = self.tenants[index]
                self._queues[index].append(
                    [index, float(count), now, tenant.prompt, tenant.output, np.inf]
                )
        self._admit()
        self.counts.replica_s += self.ready + len(self._starting) + len(self._draining)
        observed = self._compute(now)
        self._finish(now)
        return observed

    def _replace(self, now: float) -> None:
        while self._starting and self._starting[0] <= now:
            self._starting.pop(0)
            self.ready += 1
        while self._draining and self._draining[0] <= now:
            self._draining.popleft()
        for _ in range(self.target - self.ready - len(self._starting)):
            self._starting.append(now + self.start_s)

    def _admit(self) -> None:
        """Fill the room, evenly among the tenants that wait."""
        counts = self._run[:, COUNT]
        rows = self.ready * ROWS - counts.sum()
        kv = self.ready * KV_TOKENS - (counts * self._held()).sum()
        running = np.bincount(
            self._run[:, TENANT].astype(int), weights=counts, minlength=len(self.tenants)
        )
        waiting = [index for index, queue in enumerate(self._queues) if queue]
        admitted = []
        while waiting:
            index = min(waiting, key=lambda each: running[each])
            tenant, queue = self.tenants[index], self._queues[index]
            room = min(rows, kv / tenant.tokens, tenant.max_concurrency - running[index])
            if len(waiting) > 1:
                room = min(room, max(self.ready, 1.0))
            if room <= DONE:
                waiting.remove(index)
                continue
            taken = self._take(queue, room)
            admitted.append(taken)
            running[index] += taken[COUNT]
            rows, kv = rows - taken[COUNT], kv - taken[COUNT] * tenant.tokens
            if not queue:
                waiting.remove(index)
        if admitted:
            self._run = np.vstack([self._run, np.array(admitted)])

    @staticmethod
    def _take(queue: deque[list[float]], room: float) -> list[float]:
        head = queue[0]
        if head[COUNT] <= room + DONE:
            return queue.popleft()
        head[COUNT] -= room
        return [*head[:COUNT], room, *head[COUNT + 1 :]]

    def _held(self) -> Array:
        sizes = np.array([tenant.tokens for tenant in self.tenants], dtype=np.float64)
        return np.take(sizes, self._run[:, TENANT].astype(int))

    def _compute(self, now: float) -> Observed:
        """Prompts first, in their order, within their share; then a token for each row."""
        run, machines = self._run, self.ready + len(self._draining)
        counts = run[:, COUNT]
        held = float((counts * self._held()).sum())
        if not machines:
            return self._observe(0.0, 0.0, 0.0, 0.0)
        rows = float(counts.sum()) / machines
        decoding = run[:, PROMPT] <= DONE
        share = PREFILL_SHARE if decoding.any() else 1.0
        prefill = self._prefill(run, share * machines, now) / machines
        batch = max(float(counts[decoding].sum()) / machines, 1.0)
        step = step_s(batch, batch * held / max(float(counts.sum()), DONE))
        run[decoding, OUTPUT] -= (1 - prefill) / step
        thin = float(counts[decoding].sum()) / machines
        decode = (1 - prefill) * (1 - np.exp(-thin))
        fixed = FIXED_S / step * (1 - min(batch / ROWS, 1.0))
        for index, tenant in enumerate(self.tenants):
            self._gpu_s[index] = tenant.prompt * PREFILL_S + tenant.output * step / batch
        work = prefill + decode * (1 - fixed)
        return self._observe(prefill + decode, work, rows / ROWS, held / machines / KV_TOKENS)

    def _prefill(self, run: Array, seconds: float, now: float) -> float:
        """Returns the seconds of GPU time that were used."""
        todo = run[:, COUNT] * run[:, PROMPT] * PREFILL_S
        before = np.concatenate([[0.0], np.cumsum(todo)[:-1]])
        done = np.clip(seconds - before, 0.0, todo)
        begun = todo > 0
        run[begun, PROMPT] *= 1 - done[begun] / todo[begun]
        finished = begun & (run[:, PROMPT] <= DONE)
        run[finished, FIRST] = np.minimum(run[finished, FIRST], now)
        return float(done.sum())

    def _finish(self, now: float) -> None:
        over = (self._run[:, OUTPUT] <= 0) & (self._run[:, PROMPT] <= DONE)
        for cohort in self._run[over]:
            tokens = self.tenants[int(cohort[TENANT])].output
            late = now + 1 - cohort[FIRST] > TPOT_S * tokens + 1
            if late or cohort[FIRST] - cohort[ARRIVED] > TTFT_S:
                self.counts.missed += cohort[COUNT]
            else:
                self.counts.good += cohort[COUNT]
        self._run = self._run[~over & (self._run[:, COUNT] > DONE)]

    def _observe(self, busy: float, work: float, rows: float, kv: float) -> Observed:
        queued = [sum(cohort[COUNT] for cohort in queue) for queue in self._queues]
        running = np.bincount(
            self._run[:, TENANT].astype(int),
            weights=self._run[:, COUNT],
            minlength=len(self.tenants),
        )
        free = [
            max(min(count, tenant.max_concurrency - running[index]), 0.0)
            for index, (count, tenant) in enumerate(zip(queued, self.tenants, strict=True))
        ]
        backlog_s = sum(count * gpu_s for count, gpu_s in zip(free, self._gpu_s, strict=True))
        ongoing = sum(queued) + float(running.sum())
        return Observed(busy, min(work, 1.0), rows, kv, sum(free), backlog_s, ongoing)

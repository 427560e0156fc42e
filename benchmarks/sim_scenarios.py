"""The scenarios of the fairness simulation: who sends what, and when.

After those of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), section 5,
and a few of our own. Every scenario is long enough for a million tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from benchmarks.sim_engine import EngineModel, Job

Rate = Callable[[float], float]
"""Requests a second at a time."""
Size = Callable[[random.Random], tuple[int, int]]
"""Prompt and output tokens of the next request."""
WITHOUT_END = 1e9

A10 = EngineModel()
"""A small GPU with 20 rows: about 1,100 tokens a second of 256/256 requests."""
H200 = EngineModel(
    rows=256, base_s=0.008, per_row_s=0.000012, per_prompt_token_s=0.00003, chunk=512
)


def fixed(prompt: int, output: int) -> Size:
    return lambda rng: (prompt, output)


def between(prompt: tuple[int, int], output: tuple[int, int]) -> Size:
    return lambda rng: (rng.randint(*prompt), rng.randint(*output))


def lognormal(prompt: float, output: float, sigma: float = 1.0, longest: int = 4096) -> Size:
    """Medians, and the spread of their logarithms."""

    def size(rng: random.Random) -> tuple[int, int]:
        drawn = (rng.lognormvariate(0, sigma) * median for median in (prompt, output))
        first, second = (max(min(int(tokens), longest), 2) for tokens in drawn)
        return first, second

    return size


def on_off(rate: float, on_s: float, off_s: float, until: float = WITHOUT_END) -> Rate:
    def at(now: float) -> float:
        return rate if now % (on_s + off_s) < on_s and now < until else 0.0

    return at


@dataclass(frozen=True, kw_only=True)
class Client:
    """A tenant. With `outstanding` it always has so many requests open, else it follows a rate."""

    size: Size
    rate: Rate = lambda now: 0.0
    outstanding: int = 0
    steady: bool = False
    """Equal gaps rather than a Poisson process."""
    weight: float = 1.0
    prefixes: int = 0
    """Shared beginnings that its prompts have one of."""
    prefix_tokens: int = 0
    max_tokens: int = 0
    ingress_weights: tuple[int, ...] = (1,)
    starts_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    clients: dict[str, Client]
    seconds: float
    model: EngineModel = A10
    requests_per_minute: int = 60
    """Of the policy that limits by rate."""
    seed: int = 0
    _ids: count[int] = field(default_factory=count)

    @property
    def weights(self) -> dict[str, float]:
        return {name: client.weight for name, client in self.clients.items()}

    def arrivals(self) -> list[Job]:
        """All that follows a rate, in order, and the first of those without end."""
        jobs: list[Job] = []
        for name, client in self.clients.items():
            rng = random.Random(f"{self.seed} {name}")
            jobs += [self._job(name, client, rng, now) for now in self._times(client, rng)]
            jobs += [
                self._job(name, client, rng, client.starts_at + rng.random())
                for _ in range(client.outstanding)
            ]
        return sorted(jobs, key=lambda job: job.arrival)

    def again(self) -> Callable[[Job, float], Iterable[Job]]:
        """What a tenant with a fixed number of open requests sends when one of them ends."""
        rngs = {name: random.Random(f"{self.seed} {name} again") for name in self.clients}

        def on_end(job: Job, now: float) -> Iterator[Job]:
            client = self.clients[job.tenant]
            if client.outstanding:
                yield self._job(job.tenant, client, rngs[job.tenant], now)

        return on_end

    def _times(self, client: Client, rng: random.Random) -> Iterator[float]:
        """A Poisson process whose rate varies, by steps of at most a second."""
        now, owed = 0.0, 1.0 if client.steady else rng.expovariate(1.0)
        while now < self.seconds:
            step = 0.1
            owed -= client.rate(now) * step
            while owed <= 0:
                yield now
                owed += 1.0 if client.steady else rng.expovariate(1.0)
            now += step

    def _job(self, name: str, client: Client, rng: random.Random, now: float) -> Job:
        prompt, output = client.size(rng)
        shares = client.ingress_weights
        job = Job(f"{name}-{next(self._ids)}", name, now, prompt, output, client.max_tokens)
        job.ingress = rng.choices(range(len(shares)), shares)[0]
        if client.prefixes:
            order = list(self.clients).index(name)
            job.prefix = 1 + order * client.prefixes + rng.randrange(client.prefixes)
            job.prefix_tokens = client.prefix_tokens
        return job


def constant(rate: float) -> Rate:
    return lambda now: rate


def arena(seed: int, clients: int = 27, requests: int = 1500) -> Scenario:
    """Like the trace of a chat arena: a few clients send most, in bursts, and lengths vary."""
    rng = random.Random(f"arena {seed}")
    seconds, drained = 800.0, 1300.0
    shares = [1 / (rank + 1) ** 1.1 for rank in range(clients)]
    named = {}
    for rank, share in enumerate(shares):
        mean = requests * share / sum(shares) / seconds
        on_s, off_s = rng.uniform(60, 200), rng.uniform(0, 120)
        bursty = on_off(mean * (on_s + off_s) / on_s, on_s, off_s, seconds)
        named[f"client-{rank:02}"] = Client(
            size=lognormal(250, 320, 0.8, 1024), rate=bursty, max_tokens=1024
        )
    return Scenario(clients=named, seconds=drained, seed=seed, requests_per_minute=15)


def scenarios(seed: int = 0) -> dict[str, Scenario]:
    """By name."""
    same = fixed(256, 256)
    flood = Client(size=fixed(64, 1024), outstanding=600)
    victim = Client(size=lognormal(500, 100), rate=constant(2.0))
    warm = replace(flood, size=between((32, 96), (256, 1792)))
    skewed = Client(size=between((100, 400), (50, 400)), outstanding=200)
    long_prefix = Client(
        size=between((1056, 1152), (64, 192)), outstanding=60, prefixes=6, prefix_tokens=1024
    )
    all_of = {
        "overload": Scenario(
            clients={
                "a": Client(size=same, rate=constant(1.5), steady=True),
                "b": Client(size=same, rate=constant(3.0), steady=True),
            },
            seconds=1100,
        ),
        "short_long": Scenario(
            clients={
                "short": Client(size=fixed(64, 64), rate=constant(8.0)),
                "long": Client(size=fixed(768, 256), rate=constant(2.0)),
            },
            seconds=1100,
        ),
        "on_off": Scenario(
            clients={
                "bursts": Client(size=same, rate=on_off(1.0, 60, 60), steady=True),
                "steady": Client(size=same, rate=constant(3.0), steady=True),
            },
            seconds=1100,
        ),
        "poisson_on_off": Scenario(
            clients={
                "bursts": Client(size=same, rate=on_off(3.0, 60, 60)),
                "steady": Client(size=same, rate=constant(3.0)),
            },
            seconds=1100,
        ),
        "increasing": Scenario(
            clients={
                "steady": Client(size=same, rate=constant(1.0)),
                "rising": Client(size=same, rate=lambda now: 4.0 * now / 1100),
            },
            seconds=1100,
        ),
        "weights": Scenario(
            clients={
                f"w{w}": Client(size=between((50, 400), (50, 400)), outstanding=80, weight=float(w))
                for w in (1, 2, 3, 4)
            },
            seconds=2000,
        ),
        "shared_prefixes": Scenario(
            clients=dict.fromkeys("abcd", long_prefix),
            seconds=700,
            model=replace(A10, kv_tokens=20_000),
        ),
        "two_ingresses": Scenario(
            clients={
                "a": replace(skewed, ingress_weights=(4, 1)),
                "b": replace(skewed, ingress_weights=(1, 4)),
            },
            seconds=1100,
        ),
        "arena": arena(seed),
        "victim": Scenario(clients={"flood": warm, "victim": victim}, seconds=400, model=H200),
    }
    return {name: replace(each, seed=seed) for name, each in all_of.items()}

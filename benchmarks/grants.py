"""How many grants a second one core gives, with many replicas that remember prefixes of prompts.

All slots are taken and more waits, as under overload: each round ends some requests, lets as many
come and dispatches. A prompt begins with one of a hundred chains of prefixes, so that in time each
chain is cached in many places. The whole accounting runs, as in the part `cycles` of
`benchmarks.fairness`; conversations with ingresses are not part of it. Seconds are those of the
processor. `grants_per_s.100x5`: 100 replicas, prompts with 5 prefixes; `kv`: KV room runs out
before slots do.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import count

from benchmarks.fair_cycles import dispatcher_of
from benchmarks.report import Report, parser, repeat
from router.messages import Outcome, ReplicaReport, RequestInfo
from router.request import Request

TENANTS, CHAINS = 100, 100
PROMPT, OUTPUT = 800, 250
WAITING, ROUND, ROUNDS = 1_000, 200, 32
"""Requests that wait, that end and come in a round, and rounds that are timed."""


@dataclass(frozen=True)
class Fleet:
    replicas: int
    prefixes: int
    slots: int = 64
    kv_tokens: int = 10**8


FLEETS = {
    "100x0": Fleet(100, 0),
    "8x5": Fleet(8, 5),
    "100x5": Fleet(100, 5),
    "1000x5": Fleet(1000, 5),
    "100x5.kv": Fleet(100, 5, slots=256, kv_tokens=64 * (PROMPT + OUTPUT)),
}


def grants_per_s(fleet: Fleet) -> float:
    reports = (
        ReplicaReport(f"replica-{number}", fleet.slots, fleet.kv_tokens)
        for number in range(fleet.replicas)
    )
    dispatcher = dispatcher_of(TENANTS, *reports)
    numbers, running = count(), deque[Request]()

    def turn(arrivals: int) -> int:
        for number in (next(numbers) for _ in range(arrivals)):
            # Not in step with the tenants, which come in turn.
            chain = 1_000 * (number * 7 // TENANTS % CHAINS)
            prefixes = tuple(range(chain, chain + fleet.prefixes))
            info = RequestInfo(
                f"request-{number}", f"tenant-{number % TENANTS}", PROMPT, OUTPUT,
                model="m", prefixes=prefixes,
            )  # fmt: skip
            dispatcher.admit(Request(info, "ingress", OUTPUT))
        granted = dispatcher.dispatch()
        for request in granted:
            request.taken_up = True
        running.extend(granted)
        return len(granted)

    def end(endings: int) -> None:
        for request in (running.popleft() for _ in range(endings)):
            dispatcher.progress(request, OUTPUT, 0)
            dispatcher.end(request, Outcome.SUCCEEDED)
        dispatcher.ledger.take_journal()

    turn(64 * fleet.replicas + WAITING)
    granted, started = 0, time.process_time()
    for _ in range(ROUNDS):
        end(ROUND)
        granted += turn(ROUND)
    taken_s = time.process_time() - started
    assert granted > 0.9 * ROUNDS * ROUND, "what ended made room"
    return granted / taken_s


def main() -> None:
    options = parser("grants", __doc__).parse_args()
    report = Report("grants")
    gc.set_threshold(100_000, 50, 100)  # as the Admission deployment has it
    for name, fleet in FLEETS.items():
        report.add(f"grants_per_s.{name}", repeat(options.runs, partial(grants_per_s, fleet)))
    report.write(options.json)


if __name__ == "__main__":
    main()

"""How many requests a second the router admits, dispatches and settles, on one core.

The whole accounting runs: two rates and two budgets per tenant, prices, fair order, estimates,
ledger and journal. Conversations with ingresses are not part of it. Seconds are those of the
processor: what else runs on the machine does not count.
"""

from __future__ import annotations

import gc
import time
from collections import deque

from benchmarks.report import Report
from router.accounts import Accounts
from router.dispatcher import Dispatcher
from router.messages import Outcome, ReplicaReport, RequestInfo
from router.policy import FairPolicy
from router.pricing import PriceList, Prices
from router.request import Request
from router.tenant import Tenant

REQUESTS = 100_000
SLOTS = 256
ARRIVALS = 64
"""Requests that come between two dispatches."""
PROMPT, OUTPUT = 100, 50


def dispatcher_of(tenants: int, *reports: ReplicaReport) -> Dispatcher:
    """With replicas as they report, and limits of every kind that never bind."""
    accounts = Accounts(prices=PriceList({"m": Prices(prompt=0.5, cached=0.1, output=1.5)}))
    dispatcher = Dispatcher(FairPolicy(), time.monotonic, 1e9, accounts)
    configured = [
        Tenant(
            id=f"tenant-{number}",
            weight=1.0 + number % 4,
            max_concurrency=10**6,
            requests_per_minute=10**9,
            tokens_per_minute=10**12,
            daily_budget=1e6,
            monthly_budget=1e6,
        )
        for number in range(tenants)
    ]
    accounts.configure(configured)
    dispatcher.configure(configured)
    for report in reports:
        dispatcher.credits.report(report)
    return dispatcher


def cycles_per_s(tenants: int) -> float:
    dispatcher = dispatcher_of(tenants, ReplicaReport("r", SLOTS, 10**9))
    infos = [
        RequestInfo(f"request-{i}", f"tenant-{i % tenants}", PROMPT, OUTPUT, model="m")
        for i in range(REQUESTS)
    ]
    running: deque[Request] = deque()
    waiting, started = 0, time.process_time()
    for first in range(0, REQUESTS, ARRIVALS):
        for info in infos[first : first + ARRIVALS]:
            dispatcher.admit(Request(info, "ingress", OUTPUT))
        granted = dispatcher.dispatch()
        for request in granted:
            request.taken_up = True
        running.extend(granted)
        waiting += min(ARRIVALS, REQUESTS - first) - len(granted)
        while len(running) > SLOTS // 2:
            request = running.popleft()
            dispatcher.progress(request, OUTPUT, 0)
            dispatcher.end(request, Outcome.SUCCEEDED)
        dispatcher.ledger.take_journal()
    assert not waiting, "every request was granted"
    return REQUESTS / (time.process_time() - started)


def measure(report: Report, runs: int) -> None:
    """With collections of garbage as rare as the Admission deployment has them."""
    threshold = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    for tenants in (100, 10_000):
        report.add(f"cycles_per_s.{tenants}", [cycles_per_s(tenants) for _ in range(runs)])
    gc.set_threshold(*threshold)

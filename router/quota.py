"""What a tenant may use: rates and money, reserved at admission and settled at the end.

A reservation is taken on all dimensions or on none, so a refusal changes nothing. Rates reserve
what is likely, money the worst case. Knows neither order nor replicas; how many requests run at
once is the queue's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

from router.budget import Account, Budget, Period, window, zone
from router.messages import RateLimit, RateLimits, RefusalKind, RequestInfo
from router.pricing import MICRO, PriceList, micro
from router.rate import Bucket
from router.tenant import Tenant

SOON_S = 1.0
"""Until what others hold may be free: nobody knows when they end."""
SPENT_S = 0.25
"""How long an ingress may repeat that a rate or a budget is used up ..."""
FULL_S = 0.05
"""... and that what waits and runs leaves no room."""


class Denial(NamedTuple):
    """Which limit refuses a tenant, and when it may ask again."""

    kind: RefusalKind
    reason: str
    retry_after_s: float
    closed_s: float = 0.0
    """See `Refusal`."""


class Reservation(NamedTuple):
    """What is reserved for one request, and how much output that pays for (its cap)."""

    tokens: float
    micro: int
    accounts: tuple[Account, ...]
    """The accounts of the budgets that pay for it."""
    windows: tuple[str, ...]
    """Their ids."""
    max_tokens: int
    requests: int = 1
    """0 of all but the first of what a client asked for at once."""


class Quota:
    """The counters of one tenant. They outlive a reload, whatever becomes of the limits."""

    __slots__ = (
        "_budgets", "_clock", "_current", "_from", "_prices", "_rates_known", "_requests",
        "_tokens", "_until", "_wall", "_windows", "tenant",
    )  # fmt: skip

    def __init__(
        self,
        tenant: Tenant,
        prices: PriceList,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._prices, self._clock, self._wall = prices, clock, wall
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._budgets: tuple[Budget, ...] = ()
        self._current: tuple[Account, ...] = ()
        """Where money is counted now, the ids of those windows, and between which times."""
        self._windows: tuple[str, ...] = ()
        self._from, self._until = inf, -inf
        self._rates_known = False
        """Rates count what an earlier router has admitted."""
        self.configure(tenant)

    def configure(self, tenant: Tenant) -> None:
        """Take over limits, and keep what has been used of them."""
        self.tenant = tenant
        self._requests = self._resized(self._requests, tenant.requests_per_minute)
        self._tokens = self._resized(self._tokens, tenant.tokens_per_minute)
        limits = {"day": tenant.daily_budget, "month": tenant.monthly_budget}
        known = {budget.period: budget for budget in self._budgets}
        tz = zone(tenant.time_zone)
        for period in ("day", "month"):
            limit = limits[period]
            if limit is not None:
                budget = known.setdefault(period, Budget(period, 0, tz))
                budget.limit = micro(limit)
            elif period in known:
                # What is reserved in it is still to be settled.
                known[period].limit = _UNLIMITED
        for budget in known.values():
            budget.move(tz)
        self._budgets = tuple(known.values())
        self._from = inf  # to be asked again

    def reserve(self, info: RequestInfo, output: int) -> Reservation | Denial:
        """Reserve what a request may use: `output` tokens are likely. The same as `reserve_all` of
        one, and faster."""
        now, requests, rate = self._clock(), self._requests, self._tokens
        tokens, wait_s = 0.0, 0.0
        if requests is not None and requests.level(now) < 1.0:
            wait_s = requests.wait_s(1.0, now)
        if rate is not None:
            tokens = self._likely(info, output)
            if rate.level(now) < tokens:
                wait_s = max(rate.wait_s(tokens, now), wait_s)
        accounts, max_tokens, worst = self._accounts(), info.max_tokens, 0
        if accounts:
            max_tokens, worst = self._affordable(info, 1)
            if max_tokens < 1:
                return self._broke([info], wait_s)
        if wait_s:
            return self._too_fast(tokens, wait_s, now)
        if requests is not None:
            requests.take(1.0)
        if rate is not None:
            rate.take(tokens)
        for account in accounts:
            account.reserved += worst
        return Reservation(tokens, worst, accounts, self._windows, max_tokens)

    def reserve_all(
        self, asked: Sequence[tuple[RequestInfo, int]], *, again: bool = False
    ) -> list[Reservation] | Denial:
        """Reserve what a group of requests may use, or nothing. Together they are one to the rate
        of requests, and of a budget that is too small for all each has an equal share.

        again: an earlier router has admitted them already, so no rate may refuse them.
        """
        infos = [info for info, _ in asked]
        tokens = [self._likely(info, output) for info, output in asked]
        now, together = self._clock(), sum(tokens)
        wait_s = 0.0 if again else self._wait_s(together, now)
        reservations = self._reserve_money(infos, tokens)
        if reservations is None:
            return self._broke(infos, wait_s)
        if wait_s:
            self._let_go(reservations)
            return self._too_fast(together, wait_s, now)
        if not (again and self._rates_known):
            self._take(together, now)
        return reservations

    def resume(self, info: RequestInfo, output: int) -> Reservation:
        """Reserve for a request that an earlier router has admitted, whatever is left."""
        tokens = self._likely(info, output)
        if not self._rates_known:
            self._take(tokens, self._clock())
        accounts = self._accounts()
        worst = self._prices.cost(info.model, info.prompt_tokens, 0, info.max_tokens)
        for account in accounts:
            account.reserved += worst
        return Reservation(tokens, worst, accounts, self._windows, info.max_tokens)

    def settle(self, reservation: Reservation, tokens: int, price: int) -> None:
        """Replace a reservation by what was used, and its price in micro-dollars."""
        reserved_tokens, reserved_micro, accounts = reservation[:3]
        if self._tokens is not None:
            self._tokens.level(self._clock())
            self._tokens.take(tokens - reserved_tokens)
        for account in accounts:
            account.reserved -= reserved_micro
            account.spent += price

    def refund(self, reservation: Reservation) -> None:
        """The request never ran: it is as if it had never come."""
        self.settle(reservation, 0, 0)
        if self._requests is not None:
            self._requests.level(self._clock())
            self._requests.take(-reservation.requests)

    def learn_rates(self, rates: RateLimits) -> None:
        """Forgive nothing that an earlier router has counted, what still runs included."""
        now = self._clock()
        self._rates_known = True
        for bucket, told in ((self._requests, rates.requests), (self._tokens, rates.tokens)):
            if bucket is not None and told is not None:
                bucket.lower(told.limit, told.reset_s, now)

    def learn(self, window: str, spent: int) -> None:
        """Take over what was spent by others, or before this process."""
        self._accounts()  # those of now exist
        for budget in self._budgets:
            budget.learn(window, spent)

    def windows(self) -> tuple[str, ...]:
        """Ids of the windows in which money is counted now."""
        return tuple(budget.current(self._wall()).id for budget in self._budgets)

    def rate_limits(self) -> RateLimits:
        """What may be told to the tenant."""
        now = self._clock()
        return RateLimits(_told(self._requests, now), _told(self._tokens, now))

    def reserved(self) -> int:
        """Micro-dollars reserved in all windows; 0 when nothing of the tenant is open."""
        return sum(a.reserved for budget in self._budgets for a in budget.accounts().values())

    def unspent(self) -> dict[str, int]:
        """Micro-dollars by period, of the budgets that have a limit."""
        limited = (budget for budget in self._budgets if budget.limit < _UNLIMITED)
        return {budget.period: budget.unspent(self._wall()) for budget in limited}

    def spent(self) -> dict[str, int]:
        """Micro-dollars by window id."""
        self._accounts()  # those of now exist
        return {
            name: account.spent
            for budget in self._budgets
            for name, account in budget.accounts().items()
        }

    def _likely(self, info: RequestInfo, output: int) -> float:
        """Tokens to reserve; what exceeds a whole minute's worth becomes a debt when it is used."""
        limit = self._tokens.limit if self._tokens is not None else 0
        return float(min(info.prompt_tokens + output, limit))

    def _accounts(self) -> tuple[Account, ...]:
        """The accounts that pay for a request that begins now, in the order of the budgets."""
        if not self._budgets:
            return ()
        wall = self._wall()
        if not self._from <= wall < self._until:
            self._current = tuple(budget.account(wall) for budget in self._budgets)
            windows = [budget.current(wall) for budget in self._budgets]
            self._windows = tuple(each.id for each in windows)
            self._from = max(each.begins_at for each in windows)
            self._until = min(each.ends_at for each in windows)
        return self._current

    def _wait_s(self, tokens: float, now: float) -> float:
        """Until the rates let a request pass; of more than a minute's worth of tokens all of it has
        to be there, and the rest becomes a debt."""
        wait_s = 0.0
        if self._requests is not None:
            wait_s = self._requests.wait_s(1.0, now)
        if self._tokens is not None:
            wait_s = max(wait_s, self._tokens.wait_s(min(tokens, self._tokens.limit), now))
        return wait_s

    def _take(self, tokens: float, now: float) -> None:
        """One request, and its tokens."""
        for bucket, units in ((self._requests, 1.0), (self._tokens, tokens)):
            if bucket is not None:
                bucket.level(now)
                bucket.take(units)

    def _reserve_money(
        self, infos: Sequence[RequestInfo], tokens: Sequence[float]
    ) -> list[Reservation] | None:
        """Reserve the worst case of each; None, and nothing, where that cannot be paid for."""
        reservations: list[Reservation] = []
        for place, info in enumerate(infos):
            accounts, max_tokens, worst = self._accounts(), info.max_tokens, 0
            if accounts:
                max_tokens, worst = self._affordable(info, len(infos) - place)
                if max_tokens < 1:
                    self._let_go(reservations)
                    return None
            for account in accounts:
                account.reserved += worst
            requests = 0 if place else 1
            reservations.append(
                Reservation(tokens[place], worst, accounts, self._windows, max_tokens, requests)
            )
        return reservations

    @staticmethod
    def _let_go(reservations: Iterable[Reservation]) -> None:
        for reservation in reservations:
            for account in reservation.accounts:
                account.reserved -= reservation.micro

    def _left(self) -> int:
        """Micro-dollars that nobody has spent or reserved."""
        left = _UNLIMITED
        for budget, account in zip(self._budgets, self._current, strict=True):
            remaining = budget.limit - account.spent - account.reserved
            if remaining < left:
                left = remaining
        return left

    def _affordable(self, info: RequestInfo, sharers: int) -> tuple[int, int]:
        """Output that a request can pay for with its share of what is left, at most what it asks;
        and what it costs at worst."""
        left = self._left()
        if sharers > 1:
            left //= sharers
        prompt, output = info.prompt_tokens, info.max_tokens
        worst = self._prices.cost(info.model, prompt, 0, output)
        if worst > left:
            output = self._prices.affordable_output(info.model, prompt, output, left)
            worst = self._prices.cost(info.model, prompt, 0, output)
        return output, worst

    def _broke(self, infos: Sequence[RequestInfo], wait_s: float) -> Denial:
        """Come back with the window that has enough, or soon if it is only reserved."""
        wall = self._wall()
        costs = [self._prices.cost(info.model, info.prompt_tokens, 0, 1) for info in infos]
        least, cheapest = len(costs) * max(costs), self._prices.least(self.tenant.models)
        for budget in self._budgets:
            if cheapest <= budget.limit < least:
                period = f"budget of a {budget.period} ({_dollars(budget.limit)})"
                return Denial(RefusalKind.TOO_DEAR, f"the whole {period} does not pay for it", 0.0)
        short = [budget for budget in self._budgets if budget.unspent(wall) < least]
        if not short:
            reason = "what is left of the budget is reserved for requests that run"
            closed_s = FULL_S if self._left() < cheapest else 0.0
            return Denial(RefusalKind.RATE, reason, max(wait_s, SOON_S), closed_s)
        last = max(short, key=lambda budget: budget.current(wall).ends_at)
        reason = (
            f"what is left of the budget of this {last.period} ({_dollars(last.limit)})"
            " does not pay for this request"
        )
        retry_s = max(wait_s, last.current(wall).ends_at - wall)
        spent = min(budget.unspent(wall) for budget in self._budgets)
        closed_s = SPENT_S if spent < cheapest else 0.0
        return Denial(RefusalKind.BUDGET, reason, retry_s, min(closed_s, retry_s))

    def _too_fast(self, tokens: float, wait_s: float, now: float) -> Denial:
        buckets = [bucket for bucket in (self._requests, self._tokens) if bucket is not None]
        closed_s = min(max(bucket.wait_s(1.0, now) for bucket in buckets), SPENT_S)
        return Denial(RefusalKind.RATE, self._over_rate(tokens, now), wait_s, closed_s)

    def _over_rate(self, tokens: float, now: float) -> str:
        over = []
        if self._requests is not None and self._requests.wait_s(1.0, now):
            over.append(f"{self._requests.limit} requests per minute")
        if self._tokens is not None and self._tokens.wait_s(min(tokens, self._tokens.limit), now):
            over.append(f"{self._tokens.limit} tokens per minute")
        return "over the limit of " + " and ".join(over)

    def _resized(self, bucket: Bucket | None, limit: int | None) -> Bucket | None:
        if limit is None:
            return None
        if bucket is None:
            return Bucket(limit, self._clock())
        bucket.resize(limit, self._clock())
        return bucket


def windows_of(tenant: Tenant, wall: float) -> list[str]:
    """Ids of the windows in which a tenant's money is counted at the Unix time `wall`."""
    limits: dict[Period, float | None] = {
        "day": tenant.daily_budget,
        "month": tenant.monthly_budget,
    }
    tz = zone(tenant.time_zone)
    return [window(period, wall, tz).id for period, limit in limits.items() if limit is not None]


_UNLIMITED = 1 << 62
"""Micro-dollars that nobody will spend."""


def _told(bucket: Bucket | None, now: float) -> RateLimit | None:
    if bucket is None:
        return None
    level = bucket.level(now)
    return RateLimit(bucket.limit, max(int(level), 0), bucket.wait_s(bucket.limit, now))


def _dollars(micro: int) -> str:
    """At least in cents, and exactly."""
    cents, rest = divmod(micro, MICRO // 100)
    fraction = f"{cents % 100:02}" + (f"{rest:04}".rstrip("0") if rest else "")
    return f"{cents // 100}.{fraction} dollars"

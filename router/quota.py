"""What a tenant may use: rates and money, held at admission and settled at the end.

A hold is taken on all dimensions or on none, so a refusal changes nothing. Rates hold what is
likely, money the worst case. Knows neither order nor replicas; how many requests run at once is
the queue's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from router.budget import Budget, zone
from router.messages import RateLimit, RateLimits, RefusalKind, RequestInfo
from router.pricing import MICRO, PriceList, micro
from router.rate import Bucket
from router.tenant import Tenant

SOON_S = 1.0
"""Until what others hold may be free: nobody knows when they end."""


class Denial(NamedTuple):
    """Why a tenant gets nothing more now, and for how long."""

    kind: RefusalKind
    reason: str
    retry_after_s: float


class Hold(NamedTuple):
    """What one request holds. The cap comes with it: output that it can pay for."""

    tokens: float
    micro: int
    windows: tuple[str, ...]
    max_tokens: int


class Quota:
    """The counters of one tenant. They outlive a reload, whatever becomes of the limits."""

    __slots__ = (
        "_budgets", "_clock", "_prices", "_rates_known", "_requests", "_tokens", "_wall", "tenant"
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
                # What is held in it is still to be settled.
                known[period].limit = _UNLIMITED
        for budget in known.values():
            budget.move(tz)
        self._budgets = tuple(known.values())

    def hold(self, info: RequestInfo, output: int) -> Hold | Denial:
        """Hold what a request may use: `output` tokens are likely."""
        if self._requests is None and self._tokens is None and not self._budgets:
            return Hold(0.0, 0, (), info.max_tokens)
        now = self._clock()
        tokens, wait_s = 0.0, 0.0
        if self._requests is not None:
            wait_s = self._requests.wait_s(1.0, now)
        if self._tokens is not None:
            tokens = self._likely(info, output)
            wait_s = max(self._tokens.wait_s(tokens, now), wait_s)
        max_tokens = info.max_tokens
        if self._budgets:
            max_tokens = self._affordable(info)
            if max_tokens < 1:
                return self._broke(info, wait_s)
        if wait_s:
            return Denial(RefusalKind.RATE, self._over_rate(tokens, now), wait_s)
        return self._take(info, tokens, max_tokens)

    def resume(self, info: RequestInfo, output: int) -> Hold:
        """Hold for a request that an earlier router has admitted, whatever is left."""
        if self._rates_known:
            return self._take_money(info, self._likely(info, output), info.max_tokens)
        now = self._clock()
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                bucket.level(now)
        return self._take(info, self._likely(info, output), info.max_tokens)

    def settle(self, hold: Hold, model: str, prompt: int, cached: int, output: int) -> int:
        """Replace a hold by what was used. Returns its price in micro-dollars."""
        price = self._prices.cost(model, prompt, cached, output)
        self._give_back(hold, prompt + output, price)
        return price

    def refund(self, hold: Hold) -> None:
        """The request never ran: it is as if it had never come."""
        self._give_back(hold, 0, 0)
        if self._requests is not None:
            self._requests.level(self._clock())
            self._requests.take(-1.0)

    def restore(self, spent: Callable[[str], int]) -> None:
        """Take over what was spent, by window id, before this process."""
        for budget in self._budgets:
            budget.restore(spent, self._wall())

    def learn_rates(self, rates: RateLimits) -> None:
        """Forgive nothing that an earlier router has counted, what still runs included."""
        now = self._clock()
        self._rates_known = True
        for bucket, told in ((self._requests, rates.requests), (self._tokens, rates.tokens)):
            if bucket is not None and told is not None:
                bucket.lower(told.limit, told.reset_s, now)

    def learn(self, window: str, spent: int) -> None:
        """Take over what others spent, too."""
        for budget in self._budgets:
            budget.learn(window, spent)

    def windows(self) -> tuple[str, ...]:
        """Ids of the windows in which money is counted now."""
        return tuple(budget.current(self._wall()).id for budget in self._budgets)

    def rate_limits(self) -> RateLimits:
        """What may be told to the tenant."""
        now = self._clock()
        return RateLimits(_told(self._requests, now), _told(self._tokens, now))

    def held(self) -> int:
        """Micro-dollars held in all windows; 0 when nothing of the tenant is open."""
        return sum(a.held for budget in self._budgets for a in budget.accounts().values())

    def spent(self) -> dict[str, int]:
        """Micro-dollars by window id."""
        return {
            name: account.spent
            for budget in self._budgets
            for name, account in budget.accounts().items()
        }

    def _take(self, info: RequestInfo, tokens: float, max_tokens: int) -> Hold:
        if self._requests is not None:
            self._requests.take(1.0)
        if self._tokens is not None:
            self._tokens.take(tokens)
        return self._take_money(info, tokens, max_tokens)

    def _take_money(self, info: RequestInfo, tokens: float, max_tokens: int) -> Hold:
        if not self._budgets:
            return Hold(tokens, 0, (), max_tokens)
        worst, wall = self._prices.cost(info.model, info.prompt_tokens, 0, max_tokens), self._wall()
        windows = [budget.hold(worst, wall) for budget in self._budgets]
        return Hold(tokens, worst, tuple(windows), max_tokens)

    def _give_back(self, hold: Hold, tokens: int, price: int) -> None:
        if self._tokens is not None:
            self._tokens.level(self._clock())
            self._tokens.take(tokens - hold.tokens)
        # A budget that was added since comes last and holds nothing of this request.
        for budget, name in zip(self._budgets, hold.windows, strict=False):
            budget.settle(name, hold.micro, price)

    def _likely(self, info: RequestInfo, output: int) -> float:
        """Tokens to hold; what exceeds a whole minute's worth becomes a debt when it is used."""
        limit = self._tokens.limit if self._tokens is not None else 0
        return float(min(info.prompt_tokens + output, limit))

    def _affordable(self, info: RequestInfo) -> int:
        wall, left = self._wall(), _UNLIMITED
        for budget in self._budgets:
            remaining = budget.remaining(wall)
            if remaining < left:
                left = remaining
        return self._prices.affordable_output(info.model, info.prompt_tokens, info.max_tokens, left)

    def _broke(self, info: RequestInfo, wait_s: float) -> Denial:
        """Come back with the window that has enough, or soon if it is only held."""
        wall = self._wall()
        least = self._prices.cost(info.model, info.prompt_tokens, 0, 1)
        short = [budget for budget in self._budgets if budget.unspent(wall) < least]
        if not short:
            reason = "what is left of the budget is held by requests that run"
            return Denial(RefusalKind.RATE, reason, max(wait_s, SOON_S))
        last = max(short, key=lambda budget: budget.current(wall).ends_at)
        reason = f"the budget of this {last.period} is spent ({_dollars(last.limit)})"
        return Denial(RefusalKind.BUDGET, reason, max(wait_s, last.current(wall).ends_at - wall))

    def _over_rate(self, tokens: float, now: float) -> str:
        over = []
        if self._requests is not None and self._requests.wait_s(1.0, now):
            over.append(f"{self._requests.limit} requests per minute")
        if self._tokens is not None and self._tokens.wait_s(tokens, now):
            over.append(f"{self._tokens.limit} tokens per minute")
        return "over the limit of " + " and ".join(over)

    def _resized(self, bucket: Bucket | None, limit: int | None) -> Bucket | None:
        if limit is None:
            return None
        if bucket is None:
            return Bucket(limit, self._clock())
        bucket.resize(limit, self._clock())
        return bucket


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

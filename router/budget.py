"""What a tenant may spend in a day or a month of its own time zone.

Money is whole micro-dollars per window. A window has an id, so a new one starts at zero by
construction, and what was reserved in an old one is settled there. Knows neither prices nor
requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from math import inf
from typing import Literal, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo

Period: TypeAlias = Literal["day", "month"]

KEPT = 4
"""Windows of which a budget knows what was spent, although nothing is reserved in them: a clock
that was wrong for a moment comes back to one of them."""


class Window(NamedTuple):
    """A day ("2026-03-01") or a month ("2026-03")."""

    id: str
    begins_at: float
    """Unix time, as is ..."""
    ends_at: float
    """... the first moment behind it."""


def zone(name: str) -> tzinfo:
    """A time zone of the IANA database. UTC needs no database.

    Raises ValueError for one that is not known here.
    """
    if name == "UTC":
        return timezone.utc
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError):
        raise ValueError("is not a known time zone") from None


def window(period: Period, now: float, tz: tzinfo) -> Window:
    """The window that contains the Unix time `now`."""
    moment = datetime.fromtimestamp(now, tz)
    start = moment.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if period == "day":
        # Arithmetic on the wall clock: days of 23 and 25 hours exist.
        following, name = start + timedelta(days=1), start.strftime("%Y-%m-%d")
    else:
        start = start.replace(day=1)
        following = (start + timedelta(days=32)).replace(day=1)
        name = start.strftime("%Y-%m")
    return Window(name, start.timestamp(), following.timestamp())


_NONE = Window("", inf, -inf)


@dataclass(slots=True)
class Account:
    """One window's money, in micro-dollars."""

    window: str
    """Its id."""
    spent: int = 0
    reserved: int = 0


class Budget:
    """One limit per window. What is reserved counts as spent until it is settled."""

    def __init__(self, period: Period, limit: int, tz: tzinfo) -> None:
        self.period, self.limit, self.tz = period, limit, tz
        self._window = _NONE
        self._account = Account("")
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        """The current one last."""

    def current(self, now: float) -> Window:
        """The window at Unix time `now`, which follows the clock wherever that is put. What was
        spent in a window is still spent when the clock comes back to it."""
        if not self._window.begins_at <= now < self._window.ends_at:
            self._window = window(self.period, now, self.tz)
            name = self._window.id
            self._account = self._accounts.setdefault(name, Account(name))
            self._accounts.move_to_end(name)
            self._forget()
        return self._window

    def account(self, now: float) -> Account:
        """That of the window at Unix time `now`. What is reserved there may be settled there
        whenever that is, although the budget forgets it once nothing is reserved."""
        self.current(now)
        return self._account

    def remaining(self, now: float) -> int:
        """Micro-dollars neither spent nor reserved."""
        account = self.account(now)
        return self.limit - account.spent - account.reserved

    def unspent(self, now: float) -> int:
        """Micro-dollars not spent: what may remain once all reservations are settled."""
        return self.limit - self.account(now).spent

    def learn(self, name: str, spent: int) -> None:
        """Take over what was spent in a window wherever that was; it never falls."""
        account = self._accounts.get(name)
        if account is not None:
            account.spent = max(account.spent, spent)

    def accounts(self) -> Mapping[str, Account]:
        """By window: the current one, and others in which something is reserved."""
        return {
            name: account
            for name, account in self._accounts.items()
            if account is self._account or account.reserved
        }

    def move(self, tz: tzinfo) -> None:
        """Count in another time zone from now on: a window of the same name goes on."""
        if tz != self.tz:
            self.tz, self._window = tz, _NONE

    def _forget(self) -> None:
        for name in list(self._accounts)[:-KEPT]:
            if not self._accounts[name].reserved:
                del self._accounts[name]

"""What a tenant may spend in a day or a month of its own time zone.

Money is whole micro-dollars per window. A window has an id, so a new one starts at zero by
construction, and what was held in an old one is settled there. Knows neither prices nor
requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Literal, NamedTuple, TypeAlias
from zoneinfo import ZoneInfo

Period: TypeAlias = Literal["day", "month"]


class Window(NamedTuple):
    """A day ("2026-03-01") or a month ("2026-03")."""

    id: str
    ends_at: float
    """Unix time."""


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
    start = datetime.fromtimestamp(now, tz).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        # Arithmetic on the wall clock: days of 23 and 25 hours exist.
        following = start + timedelta(days=1)
        return Window(start.strftime("%Y-%m-%d"), following.timestamp())
    start = start.replace(day=1)
    following = (start + timedelta(days=32)).replace(day=1)
    return Window(start.strftime("%Y-%m"), following.timestamp())


@dataclass(slots=True)
class Account:
    """One window's money, in micro-dollars."""

    window: str
    """Its id."""
    spent: int = 0
    held: int = 0


class Budget:
    """One limit per window. What is held counts as spent until it is settled."""

    def __init__(self, period: Period, limit: int, tz: tzinfo) -> None:
        self.period, self.limit, self.tz = period, limit, tz
        self._window, self.ends_at = Window("", 0.0), 0.0
        self._account = Account("")
        self._accounts: dict[str, Account] = {}

    def current(self, now: float) -> Window:
        """The window at Unix time `now`. A clock that is put back changes nothing."""
        if now >= self.ends_at:
            self._window = window(self.period, now, self.tz)
            self.ends_at = self._window.ends_at
            name = self._window.id
            self._account = self._accounts.setdefault(name, Account(name))
            self._forget()
        return self._window

    def account(self, now: float) -> Account:
        """That of the window at Unix time `now`. What is held there may be settled there whenever
        that is, although the budget forgets it once nothing is held."""
        if now >= self.ends_at:
            self.current(now)
        return self._account

    def remaining(self, now: float) -> int:
        """Micro-dollars neither spent nor held."""
        account = self.account(now)
        return self.limit - account.spent - account.held

    def unspent(self, now: float) -> int:
        """Micro-dollars not spent: what may remain once all holds are settled."""
        return self.limit - self.account(now).spent

    def learn(self, name: str, spent: int) -> None:
        """Take over what was spent in a window wherever that was; it never falls."""
        account = self._accounts.get(name)
        if account is not None:
            account.spent = max(account.spent, spent)

    def accounts(self) -> Mapping[str, Account]:
        """By window: the current one, and earlier ones in which something is held."""
        return self._accounts

    def move(self, tz: tzinfo) -> None:
        """Count in another time zone from now on: a window of the same name goes on."""
        if tz != self.tz:
            self.tz, self.ends_at = tz, 0.0

    def _forget(self) -> None:
        over = [
            name
            for name, account in self._accounts.items()
            if name != self._window.id and not account.held
        ]
        for name in over:
            del self._accounts[name]

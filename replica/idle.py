"""Where a device's time went: busy, bubble, starved, spare.

    bubble   idle while schedulable work was in this engine: our fault
    starved  idle while work waited at the router without a grant for us: admission's fault
    spare    idle, and nobody waited

The meter is told when work is here, when the router has a backlog, and when steps computed.
All times are nanoseconds on one clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from replica.messages import DeviceTime


@dataclass(slots=True)
class IdleMeter:
    """Cumulative nanoseconds since `started_ns`, in four classes that add up to wall time."""

    started_ns: int
    busy_ns: int = 0
    bubble_ns: int = 0
    starved_ns: int = 0
    spare_ns: int = 0
    _working: bool = False
    _backlog: bool = False
    _last_end_ns: int = field(init=False)
    _booked_until_ns: int = field(init=False)
    """The time since the last step is counted as starved or spare up to here."""
    _booked_ns: int = 0

    def __post_init__(self) -> None:
        self._last_end_ns = self._booked_until_ns = self.started_ns

    def time(self, surplus_ns: float) -> DeviceTime:
        """surplus_ns: how much of the busy time was computed for nobody."""
        return DeviceTime(
            requests=(self.busy_ns - surplus_ns) / 1e9,
            surplus=surplus_ns / 1e9,
            bubble=self.bubble_ns / 1e9,
            starved=self.starved_ns / 1e9,
            spare=self.spare_ns / 1e9,
        )

    def work_arrived(self, now_ns: int) -> None:
        """There is something to schedule from now on."""
        self.book_idle(now_ns)
        self._working = True

    def work_ended(self) -> None:
        """Nothing is left to do, since the last step's end."""
        if self._working:
            self._working = False
            self._booked_until_ns = max(self._last_end_ns, self._booked_until_ns)

    def backlog_changed(self, backlog: bool, now_ns: int) -> None:
        self.book_idle(now_ns)
        self._backlog = backlog

    def book_idle(self, now_ns: int) -> None:
        """Book the time up to now, if there was nothing to do in it."""
        elapsed = now_ns - self._booked_until_ns
        if self._working or elapsed <= 0:
            return
        kind: Literal["starved_ns", "spare_ns"] = "starved_ns" if self._backlog else "spare_ns"
        setattr(self, kind, getattr(self, kind) + elapsed)
        self._booked_ns += elapsed
        self._booked_until_ns = now_ns

    def computed(self, start_ns: int, end_ns: int) -> int:
        """The device worked from start to end; calls come in order of time. Returns how much of
        that was not known to be busy."""
        self.bubble_ns += max(0, start_ns - self._last_end_ns - self._booked_ns)
        busy_ns = end_ns - max(start_ns, self._last_end_ns)
        self.busy_ns += busy_ns
        self._last_end_ns = end_ns
        self._booked_ns = 0
        return busy_ns

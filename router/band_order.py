"""Which band goes next: by priority, except that lower bands get their guaranteed shares.

A band that waits is owed its share of all service that is granted meanwhile. One that is owed
anything goes first, then one that has waited for too long without a grant, then the lowest
number. Services are the expected costs of requests, at their grants. Knows no tenants.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policy import BANDS, FairPolicy
from router.priority_band import PriorityBand


class BandOrder:
    """Bands are numbers from 0, the first, to `BANDS` - 1."""

    def __init__(self, policy: FairPolicy) -> None:
        self._shares = policy.band_shares
        self._wait_s = policy.band_wait_s
        self._owed = [0.0] * BANDS
        self._since = [0.0] * BANDS
        """Since when a band has waited without a grant."""
        self._waiting: Sequence[int] = ()

    def observe(self, waiting: Sequence[int], now: float) -> None:
        """Take note of the bands that wait, at the begin of a dispatch."""
        if waiting != self._waiting:
            for band in range(BANDS):
                if band not in waiting:
                    self._owed[band] = 0.0
                elif band not in self._waiting:
                    self._since[band] = now
            self._waiting = waiting

    def sort(self, bands: Sequence[PriorityBand], now: float) -> Sequence[PriorityBand]:
        """The bands in the order in which they may have the next grant."""
        if len(bands) < 2:
            return bands
        return sorted(bands, key=lambda band: self._rank(band.index, now))

    def granted(self, band: int, cost: float, now: float) -> None:
        """A request of a band was granted while all those waited that were observed."""
        self._since[band] = now
        if len(self._waiting) < 2:
            return
        # A debt never exceeds one request: being served first is held against nobody for longer.
        self._owed[band] = max(self._owed[band] - cost, -cost)
        for other in self._waiting:
            self._owed[other] += self._shares[other] * cost

    def _rank(self, band: int, now: float) -> tuple[float, int]:
        aged = now - self._since[band] > self._wait_s
        owed = self._owed[band]
        return (-2.0 if owed > 0 else -1.0 if aged else 0.0, band)

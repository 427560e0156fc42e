"""What service costs and how it is ordered: the knobs of fairness. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

BANDS = 4
"""Priority classes; 0 is the first."""


@dataclass(frozen=True, kw_only=True)
class FairPolicy:
    """Costs are in units of a computed prompt token. Raises ValueError on what cannot work."""

    # Read by pydantic where the application nests this class in its own settings.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    w_p: float = 1.0
    """Cost of a prompt token that is computed."""
    w_c: float = 0.25
    """Cost of a prompt token found in the prefix cache."""
    w_q: float = 2.0
    """Cost of an output token."""
    lam: float = 0.25
    """Share of the output still expected that counts in the order (λ), 0 to 1."""
    burst: float = 1000.0
    """Service that a tenant may bank while it is idle, as a cost, unless its own says otherwise."""
    expected_output: int = 256
    """Output tokens expected of a request before any has ended."""
    max_overtakes: int = 32
    """Grants to others before a request that came first goes next, wherever it fits."""
    locality: float = 500.0
    """How far behind the first tenant, in cost by weight, one may be whose prompt is cached (Q).
    0 keeps the order strictly."""
    reserve_rows: int | None = None
    """Rows of each replica that only tenants below their fair share get; by default 1 in 16."""
    band_shares: tuple[float, ...] = (0.0, 0.1, 0.05, 0.02)
    """Share of the service that each band is guaranteed while it waits, whatever goes first."""
    band_wait_s: float = 30.0
    """A band that waits for so long without a grant goes next."""
    max_waiting: int = 100_000
    """Requests of all tenants that wait; the next one is refused (503)."""

    def __post_init__(self) -> None:
        if min(self.w_p, self.w_c, self.burst, self.max_overtakes) < 0 or self.w_c > self.w_p:
            raise ValueError("fairness needs 0 <= w_c <= w_p, burst >= 0, max_overtakes >= 0")
        if self.w_q <= 0 or not 0 <= self.lam <= 1 or self.expected_output < 1:
            raise ValueError("fairness needs w_q > 0, 0 <= lam <= 1, expected_output >= 1")
        if self.locality < 0 or (self.reserve_rows or 0) < 0 or self.max_waiting < 1:
            raise ValueError("fairness needs locality >= 0, reserve_rows >= 0, max_waiting >= 1")
        shares = self.band_shares
        if len(shares) != BANDS or min(shares) < 0 or sum(shares) >= 1 or self.band_wait_s <= 0:
            raise ValueError(
                f"fairness needs {BANDS} band_shares >= 0 of a sum below 1, and band_wait_s > 0"
            )

    def reserved(self, rows: int) -> int:
        """How many of a replica's rows are kept for newcomers; one is always for everybody."""
        wanted = rows // 16 if self.reserve_rows is None else self.reserve_rows
        return max(min(wanted, rows - 1), 0)

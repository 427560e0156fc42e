"""What tokens cost: a price list per model, in integer micro-dollars.

Knows neither tenants nor budgets. A price in dollars per million tokens is a price in
micro-dollars per token; both are kept as whole numbers, so that sums never drift.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

MICRO = 1_000_000
"""Micro-dollars in a dollar, and tokens in the unit of a price."""


def micro(dollars: float) -> int:
    """Dollars as whole micro-dollars, to the nearest."""
    return round(dollars * MICRO)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dollars per million tokens of one model. Raises ValueError on what cannot work."""

    # Read by pydantic where the application nests this class in its own settings.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    prompt: float = 0.0
    """Price of a prompt token that is computed."""
    cached: float = 0.0
    """Price of a prompt token found in the prefix cache."""
    output: float = 0.0
    """Price of an output token."""

    def __post_init__(self) -> None:
        if not 0 <= self.cached <= self.prompt < MICRO or not 0 <= self.output < MICRO:
            raise ValueError(
                "prices need 0 <= cached <= prompt and 0 <= output, in dollars per million tokens"
            )

    def rates(self) -> tuple[int, int, int]:
        """Micro-dollars per million tokens: computed, cached, output."""
        return micro(self.prompt), micro(self.cached), micro(self.output)


class PriceList:
    """Prices of all models; a model without a price is free."""

    def __init__(self, prices: Mapping[str, Prices]) -> None:
        self._rates = {model: prices.rates() for model, prices in prices.items()}

    def __contains__(self, model: str) -> bool:
        return model in self._rates

    def cost(self, model: str, prompt: int, cached: int, output: int) -> int:
        """Micro-dollars of one request, rounded up once. `prompt` includes `cached`."""
        rates = self._rates.get(model)
        if rates is None:
            return 0
        uncached_rate, cached_rate, output_rate = rates
        total = uncached_rate * (prompt - cached) + cached_rate * cached + output_rate * output
        return -(-total // MICRO)

    def least(self, models: Collection[str] | None) -> int:
        """What one token in and out costs of the cheapest of these models; of all with a price, if
        None is given. 0 where one is free."""
        named = self._rates if models is None else models
        return min((self.cost(model, 1, 0, 1) for model in named), default=0)

    def affordable_output(self, model: str, prompt: int, wanted: int, micro_dollars: int) -> int:
        """Output tokens, at most `wanted`, that a request may have at the worst case: nothing of
        its prompt is cached. Negative when the prompt alone is too dear."""
        rates = self._rates.get(model)
        if rates is None:
            return wanted
        left = micro_dollars * MICRO - rates[0] * prompt
        if left < 0:
            return -1
        return wanted if rates[2] * wanted <= left else left // rates[2]

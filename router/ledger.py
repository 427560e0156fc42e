"""What each tenant used: tokens, GPU time and outcomes, each counted once per request id.

Knows token counts only; what they cost in fairness or money is another's business. Every
number that comes in is cumulative, so an older or repeated one changes nothing, whichever
attempt of the request it stems from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from router.messages import GpuTime, Outcome, RequestInfo


class Charge(NamedTuple):
    """Tokens that a call added; negative where it corrected an earlier one."""

    uncached: int = 0
    cached: int = 0
    output: int = 0


NOTHING = Charge()


class Used(NamedTuple):
    """Tokens of one request: its prompt, cached ones included, and its output."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


_UNUSED = Used()


class Entry(NamedTuple):
    """One request that is over, as the journal keeps it."""

    request_id: str
    tenant: str
    model: str
    outcome: Outcome
    used: Used
    micro_dollars: int
    slo_met: bool
    windows: tuple[str, ...]
    """Ids of the budget windows that pay for it."""
    gpu_s: float = 0.0
    """What it took of GPUs' time: our own cost."""


class Running(NamedTuple):
    """One request that has begun, and what it has to pay for by now."""

    request_id: str
    tenant: str
    model: str
    used: Used
    gpu_s: float


class Journal(NamedTuple):
    """What has happened since the last one was taken."""

    entries: list[Entry]
    refused: Counter[tuple[str, str]]
    """Requests that were refused, by tenant and model."""
    gpu: dict[str, GpuTime]
    """By replica, since it started: what those told last that told anything."""
    running: dict[str, str]
    """By ingress, what runs now, in whichever form; empty where nothing does any more."""


@dataclass(slots=True)
class Usage:
    """Totals of one tenant since the start of the process."""

    prompt_tokens: int = 0
    """Cached ones included."""
    cached_tokens: int = 0
    output_tokens: int = 0
    micro_dollars: int = 0
    gpu_s: float = 0.0
    """GPU seconds of requests that have ended."""
    slo_met: int = 0
    """Requests that succeeded in the times that the tenant was promised."""
    refused: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))


@dataclass(slots=True)
class _Entry:
    """One open request."""

    usage: Usage
    prompt_tokens: int
    charged: bool = False
    cached: int | None = None
    produced: int = 0


class Ledger:
    """What each tenant used. Calls about a request that is not open change nothing."""

    def __init__(self) -> None:
        self._usage: dict[str, Usage] = {}
        self._open: dict[str, _Entry] = {}
        self._ended: list[Entry] = []
        self._refused: Counter[tuple[str, str]] = Counter()
        self._gpu: dict[str, GpuTime] = {}
        self._active: set[str] = set()

    def __len__(self) -> int:
        """Requests that are open."""
        return len(self._open)

    def usage(self, tenants: Iterable[str] | None = None) -> dict[str, Usage]:
        """Totals of every tenant that ever had a request, or of those of these; copies."""
        names = self._usage if tenants is None else self._usage.keys() & set(tenants)
        return {
            name: replace(self._usage[name], outcomes=dict(self._usage[name].outcomes))
            for name in names
        }

    def take_active(self) -> set[str]:
        """Tenants of which a request came, ended or was refused since the last call."""
        active, self._active = self._active, set()
        return active

    def slo_counts(self) -> tuple[int, int]:
        """Requests that succeeded, and those of them that kept what was promised."""
        totals = self._usage.values()
        succeeded = sum(usage.outcomes[Outcome.SUCCEEDED] for usage in totals)
        return succeeded, sum(usage.slo_met for usage in totals)

    def open(self, info: RequestInfo) -> None:
        """Begin to account for a request; repeated calls are ignored."""
        if info.request_id in self._open:
            return
        usage = self._usage.get(info.tenant)
        if usage is None:
            usage = self._usage[info.tenant] = Usage()
        self._open[info.request_id] = _Entry(usage, info.prompt_tokens)
        self._active.add(info.tenant)

    def resume(self, info: RequestInfo, produced: int, cached: int | None) -> None:
        """Open a request of which so much was charged by an earlier router."""
        self.open(info)
        entry = self._open[info.request_id]
        entry.charged, entry.produced, entry.cached = True, produced, cached

    def dispatch(self, request_id: str) -> int:
        """Charge the prompt, as uncached, at the first dispatch. Returns the tokens charged."""
        entry = self._open.get(request_id)
        if entry is None or entry.charged:
            return 0
        entry.charged = True
        entry.usage.prompt_tokens += entry.prompt_tokens
        return entry.prompt_tokens

    def progress(self, request_id: str, produced: int, cached: int | None) -> Charge:
        """Charge output beyond the most seen so far; the first `cached` corrects the prompt.

        Work done without a dispatch known here is charged with its prompt.
        """
        entry = self._open.get(request_id)
        if entry is None or not (produced or cached is not None):
            return NOTHING
        uncached = 0 if entry.charged else self.dispatch(request_id)
        found = 0
        if cached is not None and entry.cached is None:
            entry.cached = found = min(max(cached, 0), entry.prompt_tokens)
            entry.usage.cached_tokens += found
        output = produced - entry.produced
        if output <= 0:
            return Charge(uncached - found, found)
        entry.produced = produced
        entry.usage.output_tokens += output
        return Charge(uncached - found, found, output)

    def refund(self, request_id: str) -> int:
        """Take back the prompt of a request on which no work was done. Returns its tokens."""
        entry = self._open.get(request_id)
        if entry is None or not entry.charged or entry.produced or entry.cached is not None:
            return 0
        entry.charged = False
        entry.usage.prompt_tokens -= entry.prompt_tokens
        return entry.prompt_tokens

    def used(self, request_id: str) -> Used:
        """What an open request has to pay for by now."""
        entry = self._open.get(request_id)
        if entry is None or not entry.charged:
            return _UNUSED
        return Used(entry.prompt_tokens, entry.cached or 0, entry.produced)

    def produced(self, request_id: str) -> int:
        """Output tokens of an open request."""
        entry = self._open.get(request_id)
        return entry.produced if entry else 0

    def refuse(self, info: RequestInfo) -> None:
        """Count a request that was never admitted."""
        usage = self._usage.get(info.tenant)
        if usage is None:
            usage = self._usage[info.tenant] = Usage()
        usage.refused += 1
        self._active.add(info.tenant)
        self._refused[info.tenant, info.model] += 1

    def close(
        self,
        info: RequestInfo,
        outcome: Outcome | None,
        used: Used = _UNUSED,
        micro_dollars: int = 0,
        windows: tuple[str, ...] = (),
        slo_met: bool = False,
        gpu_s: float = 0.0,
    ) -> None:
        """Count how an open request ended, what it `used` and what that cost; None, a refusal,
        counts nowhere."""
        self._active.add(info.tenant)
        entry = self._open.pop(info.request_id, None)
        if entry is None or outcome is None:
            return
        usage = entry.usage
        usage.outcomes[outcome] += 1
        usage.micro_dollars += micro_dollars
        usage.slo_met += slo_met
        usage.gpu_s += gpu_s
        self._ended.append(
            Entry(
                info.request_id,
                info.tenant,
                info.model,
                outcome,
                used,
                micro_dollars,
                slo_met,
                windows,
                gpu_s,
            )
        )

    def observe(self, replica: str, gpu: GpuTime) -> None:
        """Note what became of a GPU's time since its replica started."""
        self._gpu[replica] = gpu

    def unwritten(self) -> Counter[tuple[str, str]]:
        """Micro-dollars by tenant and window that no journal was told of yet."""
        spent: Counter[tuple[str, str]] = Counter()
        for entry in self._ended:
            for window in entry.windows:
                spent[entry.tenant, window] += entry.micro_dollars
        return spent

    def take_journal(self) -> Journal:
        """What has ended, was refused and was observed since the last call."""
        journal = Journal(self._ended, self._refused, self._gpu, {})
        self._ended, self._refused, self._gpu = [], Counter(), {}
        return journal

"""Learns what steps cost on this device: from steps timed at start, and from real ones ever after.

Least squares over relative errors, so that short steps count as much as long ones, with no
negative coefficient. What was timed at start stays in; real steps are forgotten by and by. So a
device that slows down is followed, and traffic of one kind does not unlearn the others.
Pure CPU work on numbers: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from replica.scheduling.batch import Batch, Int32s
from replica.scheduling.step_budget import CostModel

Floats: TypeAlias = npt.NDArray[np.float64]

SCALES = np.array([1.0, 1e3, 1e5, 1e8])
"""Of constant, tokens, keys and pairs: brings their coefficients to similar sizes."""
FORGET = 0.98
"""Factor on the weight of all earlier steps when a new one comes: about the last fifty count."""
FAR = 2.0
"""Most that a step may be off the prediction, as a factor; beyond that it was disturbed by
something else, and counts as this far off."""
UNSEEN_SCORE_MS = 16.0
"""Assumed cost of a score before any was measured: high, so that the first step takes few."""
SCORES_WEIGHT = 0.1
"""Weight of the newest step with scores in the running mean of what a score costs."""
NEAR = 1.15
"""A timed step within this factor of the shortest one was limited by its launches: it tells nothing
about the device's time."""
ENOUGH = 2 * len(SCALES)
"""With more steps than this beyond NEAR, the device's time is fitted to these alone; otherwise to
all."""
RIDGE, TINY = 1e-9, 1e-30
"""Regularisation: for equations that are nearly the same, and for coefficients that no equation
contains."""
_KEPT = np.array(list(product((0.0, 1.0), repeat=len(SCALES)))[1:])
"""[15, 4]: every choice of coefficients that may differ from zero, as ones and zeros."""


def step_work(starts: Int32s, lengths: Int32s) -> Floats:
    """float64 [4]: what the cost model counts of a step whose rows, [B], begin there and are so
    long."""
    pairs = lengths * (starts + lengths / 2)
    return np.array([1.0, lengths.sum(), (starts + lengths).sum(), pairs.sum()], np.float64)


def predicted_ms(model: CostModel, work: Floats) -> float:
    """Milliseconds of a step, by the work in it."""
    return max(model.floor_ms, _computed_ms(model, work))


def _computed_ms(model: CostModel, work: Floats) -> float:
    """The device's part."""
    return float(np.dot([model.fixed_ms, model.token_ms, model.key_ms, model.pair_ms], work))


@dataclass(slots=True)
class _Equations:
    """Normal equations of x * c = 1, where x is a step's work over its milliseconds."""

    left: Floats = field(default_factory=lambda: np.zeros((len(SCALES), len(SCALES))))
    right: Floats = field(default_factory=lambda: np.zeros(len(SCALES)))

    def add(self, work: Floats, ms: float, forget: float = 1.0) -> None:
        x = work / SCALES / ms
        self.left = self.left * forget + np.outer(x, x)
        self.right = self.right * forget + x


class CostFit:
    """The newest cost model, in `model`."""

    def __init__(self, timed: Iterable[tuple[Floats, float]] = ()) -> None:
        """timed: steps that were timed at start, (work, milliseconds)."""
        self.model = CostModel()
        self._start, self._recent = _Equations(), _Equations()
        self._score_ms: float | None = None
        """None until a score was measured."""
        steps = list(timed)
        self._floor_ms = min((ms for _, ms in steps), default=0.0)
        computed = [(work, ms) for work, ms in steps if ms > NEAR * self._floor_ms]
        for work, ms in computed if len(computed) > ENOUGH else steps:
            self._start.add(work, ms)
        self._solve()

    def observe(self, batch: Batch, ms: float) -> None:
        """A real step."""
        if ms <= 0:
            return
        work = step_work(batch.starts, batch.lengths)
        expected = predicted_ms(self.model, work)
        if scores := len(batch.scores):
            self._learn_scores(max(0.0, ms - expected) / scores)
            return
        ms = min(max(ms, expected / FAR), expected * FAR) if expected > 0 else ms
        if _computed_ms(self.model, work) > self._floor_ms:
            self._recent.add(work, ms, FORGET)
        else:
            self._floor_ms += (1 - FORGET) * (ms - self._floor_ms)
        self._solve()

    def limits(self, batch: Batch) -> Floats:
        """float64 [5]: parts of a step's time that go on weights, tokens, keys, attention and
        launches. They sum to 1, or are zero if nothing is known. Decode steps have few launches,
        or a graph."""
        model, work = self.model, step_work(batch.starts, batch.lengths)
        parts = np.zeros(len(SCALES) + 1)
        parts[:-1] = (model.fixed_ms, model.token_ms, model.key_ms, model.pair_ms) * work
        if not batch.decodes_only:
            parts[-1] = max(0.0, model.floor_ms - parts.sum())
        return parts / (parts.sum() or 1.0)

    def _learn_scores(self, ms: float) -> None:
        """What one took more than the model says. It teaches nothing about the rest."""
        known = ms if self._score_ms is None else self._score_ms
        self._score_ms = known + SCORES_WEIGHT * (ms - known)
        self.model = replace(self.model, score_ms=self._score_ms)

    def _solve(self) -> None:
        """Of all sets of coefficients that may differ from zero, the best with none below it."""
        left = self._start.left + self._recent.left
        # Relative to each: devices differ by factors of thousands.
        left = left + np.diag(RIDGE * np.diag(left) + TINY)
        right = self._start.right + self._recent.right
        masked = left * _KEPT[:, :, None] * _KEPT[:, None, :]
        masked += np.eye(len(SCALES)) * (1 - _KEPT)[:, :, None]
        found = np.linalg.solve(masked, (right * _KEPT)[:, :, None])[:, :, 0]
        error = np.einsum("si,ij,sj->s", found, left, found) - 2 * found @ right
        error[(found < 0).any(axis=1)] = np.inf
        fixed, token, key, pair = (found[np.argmin(error)] / SCALES).tolist()
        score = UNSEEN_SCORE_MS if self._score_ms is None else self._score_ms
        self.model = CostModel(fixed, token, key, pair, self._floor_ms, score)

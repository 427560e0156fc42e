"""Whose the device's time was: each step's is split over its rows by weighted tokens.

A token that is computed weighs one, and one more if the next token is sampled behind it: so an
output token costs twice a prompt token. Knows neither clocks nor requests.
"""

from __future__ import annotations

import numpy as np

from replica.batch import Batch
from replica.rows import Rows


def share_out(rows: Rows, batch: Batch, padding: int, busy_ns: int) -> float:
    """Book a collected step, before it is settled, to the sequences that it served.

    padding: decode rows that it computed for nobody. Returns the nanoseconds that served nobody:
    those of padding, and of rows whose sequences had ended. All in all it is `busy_ns`.
    """
    weights = batch.lengths.astype(np.float64)
    weights[batch.samples] += 1.0
    token_ns = busy_ns / (weights.sum() + 2.0 * padding)
    weights *= token_ns
    ended = rows.ended[batch.rows]
    surplus_ns = 2.0 * padding * token_ns + weights[ended].sum()
    weights[ended] = 0.0
    rows.gpu_ns[batch.rows] += weights
    return float(surplus_ns)

"""Splits the device time of each step over its rows, by weighted tokens.

A token that is computed weighs one, and one more if the next token is sampled behind it: so an
output token costs twice a prompt token. Knows neither clocks nor requests.
"""

from __future__ import annotations

from replica.scheduling.batch import Batch
from replica.scheduling.rows import Rows


def attribute_time(rows: Rows, batch: Batch, padding: int, busy_ns: int) -> float:
    """Book a collected step, before it is settled, to the sequences that it served.

    padding: decode rows that it computed for nobody. Returns the nanoseconds that served nobody:
    those of padding, and of rows whose sequences had ended. All in all it is `busy_ns`.
    """
    token_ns = busy_ns / (batch.num_tokens + len(batch.samples) + 2 * padding)
    shares = batch.lengths * token_ns
    shares[batch.samples] += token_ns
    surplus_ns = 2 * padding * token_ns
    ended = rows.ended[batch.rows]
    if ended.any():
        surplus_ns += float(shares[ended].sum())
        shares[ended] = 0.0
    rows.gpu_ns[batch.rows] += shares
    return surplus_ns

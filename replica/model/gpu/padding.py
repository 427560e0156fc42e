"""Rounds the number of tokens up, so that products meet few different sizes.

cuBLAS thinks for milliseconds about each number of rows that it has not seen yet, and may load a
kernel for it. So rows are allocated with padding behind them, up to a round number, and a product
takes the whole: what comes of the padding is read by nobody.
"""

from __future__ import annotations

from torch import Tensor

ROUND = 64


def rounded(count: int) -> int:
    return -(-count // ROUND) * ROUND


def empty_rows(like: Tensor, count: int, columns: int) -> Tensor:
    """[count, columns] of the type of `like`, with padding behind."""
    return like.new_empty(rounded(count), columns)[:count]


def with_padding(rows: Tensor) -> Tensor:
    """What `empty_rows` has made, with the padding. Raises RuntimeError if there is none."""
    return rows.as_strided((rounded(len(rows)), rows.shape[1]), rows.stride())

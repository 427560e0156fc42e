"""Which batch sizes to capture graphs for. Arithmetic only.

A step runs in the smallest captured size that holds it; what is beyond its rows is padding. More
sizes mean less padding, and a longer start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

_SPACINGS = ((1, 1), (2, 2), (8, 4), (16, 8), (64, 16), (128, 32), (512, 64))
"""(size, spacing): from that size on, graphs are captured every `spacing` rows, so that less than a
third of a step is padding."""


def default_sizes(max_rows: int) -> tuple[int, ...]:
    """Sizes up to `max_rows`, which is one of them even off the spacing."""
    ends = [start for start, _ in _SPACINGS[1:]] + [max_rows + 1]
    sizes = {max_rows}
    for (start, every), end in zip(_SPACINGS, ends, strict=True):
        sizes.update(range(start, min(end, max_rows + 1), every))
    return tuple(sorted(sizes))


def padding_share(seen: Mapping[int, int], sizes: Sequence[int]) -> float:
    """Padded rows of all computed rows, with graphs of these ascending sizes."""
    rows = sum(size * steps for size, steps in seen.items())
    padded = sum(sizes[bisect_left(sizes, size)] * steps for size, steps in seen.items())
    return 1 - rows / padded if padded else 0.0


def fit_report(seen: Mapping[int, int], sizes: Sequence[int]) -> str:
    """What the batches of a run say about sizes: padding against captures, for `graph_sizes`."""
    steps = sum(seen.values())
    lines = [f"{steps} steps padded {padding_share(seen, sizes):.1%} with {len(sizes)} graph_sizes"]
    for count in (1, 2, 4, 8, 16, 32):
        fitted = fitted_sizes(seen, count, sizes[-1])
        if len(fitted) == count:
            share = padding_share(seen, fitted)
            lines.append(f"  {share:6.1%} with graph_sizes: {list(fitted)}")
    return "\n".join(lines)


def fitted_sizes(seen: Mapping[int, int], count: int, max_rows: int) -> tuple[int, ...]:
    """The at most `count` sizes, `max_rows` among them, with the fewest padded rows.

    seen: how many steps had each batch size. Dynamic programming over the sizes seen: an optimal
    set has no other sizes, as lowering one to the next size seen below it pads less.
    """
    sizes = sorted({size for size in seen if size <= max_rows} | {max_rows})
    steps = list(accumulate((seen.get(size, 0) for size in sizes), initial=0))
    rows = list(accumulate((seen.get(size, 0) * size for size in sizes), initial=0))

    def padding(first: int, last: int) -> int:
        """Padding rows of all steps with sizes[first..last], if they run in sizes[last]."""
        return sizes[last] * (steps[last + 1] - steps[first]) - (rows[last + 1] - rows[first])

    # best[last]: fewest padded rows of steps up to sizes[last] with it as the largest, and how.
    best: list[tuple[int, tuple[int, ...]]]
    best = [(padding(0, last), (size,)) for last, size in enumerate(sizes)]
    for _ in range(count - 1):
        best = [
            min(
                best[last],
                *(
                    (best[below][0] + padding(below + 1, last), (*best[below][1], size))
                    for below in range(last)
                ),
            )
            if last
            else best[last]
            for last, size in enumerate(sizes)
        ]
    return best[-1][1]

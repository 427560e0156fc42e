from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from replica.device.graph_sizes import default_sizes, fit_report, fitted_sizes, padding_share


@given(st.integers(1, 1000))
def test_default_sizes_cover_every_batch_with_little_padding(max_rows):
    """R32: the largest batch is captured also where it is off the spacing."""
    sizes = default_sizes(max_rows)
    assert sizes[-1] == max_rows
    assert len(sizes) < 40
    for rows in range(1, max_rows + 1):
        size = min(size for size in sizes if size >= rows)
        assert size - rows < size / 3


def padded(seen: dict[int, int], sizes: tuple[int, ...]) -> int:
    return sum(count * (min(s for s in sizes if s >= rows) - rows) for rows, count in seen.items())


@given(
    st.dictionaries(st.integers(1, 9), st.integers(1, 50), min_size=1),
    st.integers(1, 4),
)
def test_fitted_sizes_pad_least(seen, count):
    fitted = fitted_sizes(seen, count, 10)
    assert fitted[-1] == 10
    assert len(fitted) <= count
    candidates = [(*chosen, 10) for k in range(count) for chosen in combinations(range(1, 10), k)]
    assert padded(seen, fitted) == min(padded(seen, sizes) for sizes in candidates)


def test_the_report_shows_padding_against_captures():
    seen = {1: 60, 3: 30, 7: 10}
    assert padding_share(seen, (1, 3, 7, 8)) == 0
    assert padding_share(seen, (8,)) == 1 - 220 / 800
    assert fit_report(seen, (8,)).splitlines() == [
        "100 steps padded 72.5% with 1 graph_sizes",
        "   72.5% with graph_sizes: [8]",
        "   37.1% with graph_sizes: [3, 8]",
        "    0.0% with graph_sizes: [1, 3, 7, 8]",
    ]

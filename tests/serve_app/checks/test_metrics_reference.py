"""docs/metrics.md says what is declared."""

from __future__ import annotations

from pathlib import Path

from serve_app.checks.metrics_reference import reference

PAGE = Path("docs/metrics.md")


def test_the_page_is_that_of_these_metrics() -> None:
    told = "write it anew: python -m serve_app.checks.metrics_reference > docs/metrics.md"
    assert PAGE.read_text(encoding="utf-8") == reference(), told

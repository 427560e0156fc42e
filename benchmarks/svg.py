"""Pieces of SVG pictures that can be read on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

TEXT, BLUE, ORANGE, RED = "#768390", "#4c8dd6", "#d9822b", "#d0524a"
"""Neither dark nor light."""
WIDTH = 860


def svg(height: int, title: str, parts: Iterable[str]) -> str:
    """A picture of WIDTH x height."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{TEXT}">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def words(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'

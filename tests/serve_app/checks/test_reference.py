"""docs/configuration.md says what the settings say."""

from __future__ import annotations

import re
from pathlib import Path

from serve_app.checks.reference import PARTS, attribute_docstrings, reference

PAGE = Path("docs/configuration.md")


def test_the_page_is_that_of_these_settings() -> None:
    told = "write it anew: python -m serve_app.checks.reference > docs/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == reference(), told


def test_each_option_says_what_it_does() -> None:
    bare = [
        f"{kind.__name__}.{name}"
        for _, _, kind in PARTS
        for name in kind.__annotations__
        if not name.startswith(("_", "model_config")) and name not in attribute_docstrings(kind)
    ]
    assert [name for name in bare if "ScalingLimits" not in name] == []


def test_links_lead_to_a_heading() -> None:
    text = reference()
    headings = {line[3:].lower().replace(" ", "-") for line in re.findall("^## .*", text, re.M)}
    assert set(re.findall(r"\(#([^)]*)\)", text)) <= headings

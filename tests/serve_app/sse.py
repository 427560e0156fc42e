"""Reads server-sent events strictly."""

from __future__ import annotations

import json
from typing import Any


def events(body: str) -> list[Any]:
    """Decoded data of each event; [DONE] stays a string. Fails on anything malformed."""
    assert body.endswith("\n\n")
    out: list[Any] = []
    for block in body[:-2].split("\n\n"):
        assert block.startswith("data: ")
        assert "\n" not in block
        data = block.removeprefix("data: ")
        out.append(data if data == "[DONE]" else json.loads(data))
    return out


def texts(chunks: list[Any]) -> dict[int, str]:
    """Joined text of each choice, of either endpoint."""
    out: dict[int, str] = {}
    for chunk in chunks:
        if isinstance(chunk, dict):
            for choice in chunk.get("choices", ()):
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                out[choice["index"]] = out.get(choice["index"], "") + text
    return out

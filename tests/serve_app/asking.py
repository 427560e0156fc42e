"""Requests that are fine, to be spoilt by a test, and what a refusal must look like."""

from __future__ import annotations

from typing import Any

import httpx

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HUGE = 2**63


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "text", "messages": [{"role": "user", "content": "hello"}], **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "text", "prompt": "hello", **fields}


def refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a reply that has OpenAI's shape and is small."""
    assert reply.status_code == status, reply.text
    assert len(reply.content) <= 4096
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error

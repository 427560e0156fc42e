"""Requests of tests that read streams."""

from __future__ import annotations

from typing import Any

import httpx

from tests.serve_app.sse import events


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"model": "text", "messages": [{"role": "user", "content": content}], **more}


def completion(prompt: str | list[str], **more: Any) -> dict[str, Any]:
    return {"model": "text", "prompt": prompt, "max_tokens": 100, **more}


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    reply = http.post(path, json=body | {"stream": True})
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events(reply.text)

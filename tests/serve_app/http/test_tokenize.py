"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve_app.asking import chat, refused, text


def test_texts_and_conversations_are_tokenised_as_for_an_answer(http: httpx.Client) -> None:
    expected = {"tokens": [*b"hello"], "count": 5, "max_model_len": 200}
    assert http.post("/tokenize", json=text()).json() == expected
    assert http.post("/tokenize", json=chat()).json() == expected
    assert http.post("/tokenize", json=text(add_special_tokens=None)).json() == expected
    assert http.post("/tokenize", json=text(prompt="")).json()["tokens"] == []
    body = {"model": "text", "tokens": [*"héé".encode(), 256]}
    assert http.post("/detokenize", json=body).json() == {"prompt": "héé</s>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": ["a"] * 100_000}, "tokens"),
    ],
)
def test_what_cannot_be_tokenised_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = refused(http.post(path, json={"model": "text", **body}))
    assert error["param"].startswith(param)
    assert ";" not in error["message"], "the first fault is enough: a million take seconds to tell"
    refused(http.post(path, json={"model": "other", "prompt": "a", "tokens": []}), 404)

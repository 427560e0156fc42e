"""Prompts over HTTP: text, ids, lists of either, their lengths, and echo."""

from __future__ import annotations

import httpx
import pytest

from tests.serve_app.asking import CHAT, HUGE, TEXT, chat, refused, text
from tests.serve_app.text_backend import TextBackend


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        "",
        [""],
        [[]],
        ["a", [1]],
        [1, "a"],
        [[1], 2],
        [["a"]],
        [-1],
        [258],
        [300],
        [2**31],
        [HUGE],
        [True],
        [1.5],
        ["7x", 1],
        ["a"] * 129,
        None,
        5,
        {"a": 1},
    ],
)
def test_a_bad_prompt_is_refused(http: httpx.Client, backend: TextBackend, prompt: object) -> None:
    """C22, R17."""
    error = refused(http.post(TEXT, json=text(prompt=prompt)))
    assert error["param"].split(".")[0] == "prompt"
    assert backend.generations == []


def test_a_body_of_far_too_many_parts_is_refused_as_a_whole(
    http: httpx.Client, backend: TextBackend
) -> None:
    """R17. Before it is read: nobody looks at what its parts are."""
    refused(http.post(TEXT, json=text(prompt=["a"] * 1_100_000)))
    assert backend.generations == []


def test_prompts_times_choices_are_bounded(http: httpx.Client) -> None:
    """R17."""
    assert http.post(TEXT, json=text(prompt=["a"] * 64, n=2)).status_code == 200
    refused(http.post(TEXT, json=text(prompt=["a"] * 65, n=2)))


def test_each_sequence_has_its_own_id_and_choice(http: httpx.Client, backend: TextBackend) -> None:
    """R17: costs are charged per prompt."""
    http.post(TEXT, json=text(prompt=[[97], [98, 99]], n=2, seed=-1))
    sequences = sorted(backend.generations, key=lambda generation: generation.request_id)
    assert len({generation.request_id for generation in sequences}) == 4
    assert [s.prompt_ids for s in sequences] == [(97,), (97,), (98, 99), (98, 99)]
    assert [s.sampling.choice for s in sequences] == [0, 1, 0, 1]
    assert {s.sampling.seed for s in sequences} == {2**64 - 1}


def test_seeds_are_drawn_per_prompt(http: httpx.Client, backend: TextBackend) -> None:
    http.post(TEXT, json=text(prompt=["a", "a"], n=2))
    seeds = [generation.sampling.seed for generation in backend.generations]
    assert len(set(seeds)) == 2


@pytest.mark.parametrize("asked", [None, 1, 2, 10**9])
@pytest.mark.parametrize("length", [198, 199, 200, 201])
def test_a_prompt_at_the_end_of_the_context(
    http: httpx.Client, length: int, asked: int | None
) -> None:
    """C31. Rule: what the context has no room for is cut off from max_tokens."""
    reply = http.post(TEXT, json=text(prompt=[97] * length, max_tokens=asked))
    if length >= 200:
        error = refused(reply)
        assert error["code"] == "context_length_exceeded"
        assert f"{length} tokens" in error["message"]
        assert "200 tokens" in error["message"]
        return
    room = 200 - length
    answer = reply.json()
    assert answer["usage"]["completion_tokens"] == min(room, asked or 16)
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [None, 0, -1, "5", 1.5, True])
def test_a_prompt_that_is_too_long_is_told_first(http: httpx.Client, asked: object) -> None:
    """R16."""
    long = [{"role": "user", "content": "a" * 300}]
    for path, body in ((CHAT, chat(messages=long)), (TEXT, text(prompt="a" * 300))):
        error = refused(http.post(path, json=body | {"max_tokens": asked}))
        assert error["code"] == "context_length_exceeded"
        assert "300 tokens" in error["message"]


@pytest.mark.parametrize("prompt", ["日本", list("日本".encode())])
def test_echo_puts_the_prompt_first(http: httpx.Client, prompt: object) -> None:
    reply = http.post(TEXT, json=text(prompt=prompt, echo=True, max_tokens=3))
    assert reply.json()["choices"][0]["text"] == "日本日"


def test_stop_strings_are_not_looked_for_in_the_echo(http: httpx.Client) -> None:
    reply = http.post(TEXT, json=text(prompt="abc", echo=True, stop="bc"))
    assert reply.json()["choices"][0]["text"] == "abca"

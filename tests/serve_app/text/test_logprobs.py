"""Log probabilities in both shapes, streamed or not, read by the real client."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import openai
import pytest

from replica.messages import TokenLogprobs
from serve_app.text.logprobs import LEAST, ShownToken, for_chat, for_text
from serve_app.text.token_texts import TokenTexts
from tests.serve_app.asking import CHAT, TEXT, chat, text
from tests.serve_app.sse import events
from tests.serve_app.text_backend import TextBackend, byte_tokenizer, logprob
from tests.serve_app.tokenizers_made import metaspace_tokenizer, wordpiece_tokenizer

ANSWERS = ["hello", "日本 x", "a", "\N{THUMBS UP SIGN}!"]


def chat_tokens(client: openai.OpenAI, stream: bool, content: str, **fields: Any) -> list[Any]:
    """Text and content tokens of an answer."""
    body = chat(messages=[{"role": "user", "content": content}], logprobs=True, **fields)
    if not stream:
        choice = client.chat.completions.create(**body).choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.refusal is None
        return [choice.message.content, choice.logprobs.content]
    joined, tokens = "", []
    for chunk in client.chat.completions.create(**body, stream=True):
        choice = chunk.choices[0]
        joined += choice.delta.content or ""
        tokens += (choice.logprobs.content or []) if choice.logprobs else []
    return [joined, tokens]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("per_delta", [1, 3, 50])
@pytest.mark.parametrize("answer", ANSWERS)
def test_chat_tokens_join_to_the_text(
    client: openai.OpenAI, backend: TextBackend, stream: bool, per_delta: int, answer: str
) -> None:
    """R02: each token has its own alternatives, however many come at once."""
    backend.per_delta = per_delta
    content, tokens = chat_tokens(client, stream, answer, top_logprobs=2)
    assert content == answer
    assert bytes(byte for token in tokens for byte in token.bytes) == answer.encode()
    for token, byte in zip(tokens, answer.encode(), strict=True):
        assert token.logprob == pytest.approx(logprob(byte))
        expected = [(byte, logprob(byte)), ((byte + 1) % 256, logprob(byte) - 1)]
        for top, (other, value) in zip(token.top_logprobs, expected, strict=True):
            assert (top.bytes, top.logprob) == ([other], pytest.approx(value))
        assert token.token == (chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}")


def test_logprobs_alone_tell_no_alternatives(client: openai.OpenAI) -> None:
    _, tokens = chat_tokens(client, False, "hi")
    assert [token.top_logprobs for token in tokens] == [[], []]


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"logprobs": None}])
def test_nobody_gets_what_he_did_not_ask_for(http: httpx.Client, fields: dict[str, Any]) -> None:
    body = http.post(CHAT, json=chat(**fields)).json()
    assert body["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in body["choices"][0]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("fields", "shown", "told"),
    [
        ({"stop": "END"}, "one ", "one "),
        ({"stop": "END", "include_stop_str_in_output": True}, "one END", "one END"),
        ({"stop": "ne E"}, "o", "o"),
        ({"max_completion_tokens": 5}, "one E", "one E"),
        ({"stop_token_ids": [ord("E")]}, "one ", "one "),
        ({"stop": "one", "min_tokens": 4}, "one END two", "one END two"),
    ],
    ids=str,
)
def test_tokens_that_a_stop_cuts_away_are_not_told(
    client: openai.OpenAI, stream: bool, fields: dict[str, Any], shown: str, told: str
) -> None:
    extra = {name: value for name, value in fields.items() if name in EXTRA}
    known = {name: value for name, value in fields.items() if name not in EXTRA}
    content, tokens = chat_tokens(client, stream, "one END two", extra_body=extra, **known)
    assert content == shown
    assert "".join(token.token for token in tokens) == told


EXTRA = ("include_stop_str_in_output", "stop_token_ids", "min_tokens")


def completion(client: openai.OpenAI, stream: bool, **fields: Any) -> dict[int, dict[str, Any]]:
    """By choice: its text and its four lists."""
    out: dict[int, dict[str, Any]] = {}
    chunks = client.completions.create(**text(**fields), stream=stream)
    for chunk in chunks if stream else [chunks]:
        for choice in chunk.choices:
            own = out.setdefault(choice.index, {"text": ""})
            own["text"] += choice.text
            lists = choice.logprobs.model_dump() if choice.logprobs else {}
            for name, values in lists.items():
                own.setdefault(name, []).extend(values)
    return out


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("per_delta", [1, 4])
def test_completion_lists_are_of_equal_length(
    client: openai.OpenAI, backend: TextBackend, stream: bool, per_delta: int
) -> None:
    backend.per_delta = per_delta
    got = completion(client, stream, prompt=["ab日", "xyz"], logprobs=2)
    assert got[0]["tokens"] == ["a", "b", "bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"]
    assert got[0]["text_offset"] == [0, 1, 2, 2, 2]
    assert got[1]["text_offset"] == [0, 1, 2]
    assert got[1]["token_logprobs"] == pytest.approx([logprob(ord(c)) for c in "xyz"])
    assert [list(top) for top in got[1]["top_logprobs"]] == [["x", "y"], ["y", "z"], ["z", "{"]]


def test_the_chosen_token_is_always_told(client: openai.OpenAI) -> None:
    got = completion(client, False, prompt="ab", logprobs=0)
    assert got[0]["top_logprobs"] == [
        {"a": pytest.approx(logprob(97))},
        {"b": pytest.approx(logprob(98))},
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_comes_with_its_own(client: openai.OpenAI, stream: bool, n: int) -> None:
    """C40: the first entry is null."""
    got = completion(client, stream, prompt=["ab", "日c"], logprobs=1, echo=True, n=n)
    assert len(got) == 2 * n
    for index, prompt in enumerate(["ab", "日c"]):
        for choice in range(index * n, (index + 1) * n):
            own, data = got[choice], prompt.encode() * 2
            assert own["text"] == prompt * 2
            wanted = [None, *[pytest.approx(logprob(byte)) for byte in data[1:]]]
            assert own["token_logprobs"] == wanted
            assert own["top_logprobs"][0] is None
            assert len(own["tokens"]) == len(own["text_offset"]) == len(data)
            assert own["text_offset"][len(data) // 2] == len(prompt)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("prompt", ["ab", ["ab", "cde"], [97, 98]], ids=str)
def test_an_echo_alone_scores_the_prompt(
    http: httpx.Client, backend: TextBackend, stream: bool, prompt: Any
) -> None:
    """R05: no output is shown, and none is counted."""
    body = text(prompt=prompt, echo=True, max_tokens=0, logprobs=1, stream=stream)
    if stream:
        body["stream_options"] = {"include_usage": True}
    reply = http.post(TEXT, json=body)
    assert reply.status_code == 200
    replies = events(reply.text)[:-1] if stream else [reply.json()]
    first = next(choice for chunk in replies for choice in chunk["choices"])
    assert first["text"] == "ab"
    assert first["logprobs"]["token_logprobs"] == [None, pytest.approx(logprob(98))]
    endings = [c["finish_reason"] for chunk in replies for c in chunk["choices"]]
    assert endings.count("length") == len(prompt) if prompt == ["ab", "cde"] else 1
    assert replies[-1]["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_are_keyed_by_token_id(http: httpx.Client) -> None:
    for path, body in ((CHAT, chat()), (TEXT, text())):
        choice = http.post(path, json=body | {"prompt_logprobs": 1}).json()["choices"][0]
        first, second, *rest = choice["prompt_logprobs"]
        assert first is None
        assert second == {"101": {"logprob": pytest.approx(logprob(101)), "decoded_token": "e"}}
        assert len(rest) == 3
        assert choice["logprobs"] is None


def test_the_likeliest_choices_are_shown(http: httpx.Client, backend: TextBackend) -> None:
    """best_of: by the mean of a choice's log probabilities; all of them are charged."""
    answers = iter(["zz", "1", "ab", "2x", "3", "dd"])
    generate = backend.generate

    def other(generation: Any) -> Any:
        from dataclasses import replace

        return generate(replace(generation, prompt_ids=tuple(next(answers).encode())))

    backend.generate = other  # type: ignore[method-assign]
    reply = http.post(TEXT, json=text(prompt=["x", "y"], best_of=3, n=2)).json()
    del backend.generate
    scores = {a: sum(logprob(b) for b in a.encode()) / len(a) for a in ("zz", "1", "ab")}
    best = sorted(scores, key=lambda answer: -scores[answer])[:2]
    assert [choice["text"] for choice in reply["choices"]][:2] == best
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert {choice["logprobs"] for choice in reply["choices"]} == {None}
    assert reply["usage"]["completion_tokens"] == 10 + 6


@pytest.mark.parametrize("value", [-float("inf"), float("nan")])
def test_what_json_cannot_carry_is_a_number(value: float) -> None:
    """C29."""
    texts = TokenTexts(byte_tokenizer().backend_tokenizer)
    told = [ShownToken(65, 0, TokenLogprobs(value, (65, 66), (0.0, value)))]
    [content] = for_chat(told, texts).content
    assert msgspec.json.decode(content)["top_logprobs"][1]["logprob"] == LEAST
    assert for_text(told, texts).token_logprobs == [LEAST]


@pytest.mark.parametrize("tokenizer", [metaspace_tokenizer(), wordpiece_tokenizer()])
def test_tokens_of_text_read_as_behind_another(tokenizer: Any) -> None:
    texts = TokenTexts(tokenizer)
    vocabulary = tokenizer.get_vocab()
    if "▁Hello" in vocabulary:
        assert texts(vocabulary["▁Hello"])[0] == " Hello"
        assert texts(vocabulary["<0xE4>"]) == ("bytes:\\xe4", [0xE4])
        assert texts(vocabulary["</s>"])[0] == "</s>"
    else:
        assert texts(vocabulary["##ing"])[0] == "ing"
        assert texts(vocabulary["hello"])[0] == " hello"
    assert texts(10**6) == ("", [])

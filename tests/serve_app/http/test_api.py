from __future__ import annotations

import json
import logging
import resource
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from tests.serve_app.asking import CHAT, HUGE, TEXT, chat, refused, text
from tests.serve_app.text_backend import TextBackend


def test_the_sdk_reads_whole_answers(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**chat(n=2))
    assert [choice.message.content for choice in reply.choices] == ["hello", "hello"]
    assert [choice.index for choice in reply.choices] == [0, 1]
    completion = client.completions.create(model="text", prompt=["ab", "cd"], echo=True)
    assert [choice.text for choice in completion.choices] == ["abab", "cdcd"]
    assert completion.object == "text_completion"


def test_the_sdk_lists_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["text", "text-alias"]
    assert client.models.retrieve("text").created == 1_700_000_000
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_an_alias_is_the_same_model(client: openai.OpenAI) -> None:
    """Answers name the model itself."""
    alias = client.models.retrieve("text-alias")
    assert (alias.id, alias.model_extra["root"]) == ("text-alias", "text")
    assert client.chat.completions.create(**chat(model="text-alias")).model == "text"
    assert client.completions.create(**text(model="text-alias")).choices[0].text == "hello"


def test_the_version_is_told(http: httpx.Client) -> None:
    assert http.get("/version").json().keys() == {"version"}
    assert http.get("/version").json()["version"]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": None},
        {"stop": []},
        {"stop": ["a", "a"]},
        {"n": None},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": None},
        {"top_k": 9_999_999},
        {"top_p": 0},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"temperature": 0},
        {"max_tokens": 10**9},
        {"logit_bias": {}},
        {"logit_bias": None},
        {"logit_bias": {"0": 100, "257": -100.0}},
        {"logit_bias": {str(token): 0.5 for token in range(258)}},
        {"frequency_penalty": 0},
        {"frequency_penalty": 2},
        {"presence_penalty": -2.0},
        {"repetition_penalty": 1},
        {"min_p": 0},
        {"min_p": 1.0},
        {"bad_words": []},
        {"bad_words": ["a", "a"]},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": None},
        {"logprobs": None, "top_logprobs": None},
        {"stop_token_ids": []},
        {"chat_template_kwargs": {"enable_thinking": False, "other": [1]}},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"guided_choice": None},
        {"stream_options": None},
        *[{"user": value} for value in ("someone", None, 5, {})],
        {"response_format": {"type": "json_object", "schema": None}},
        *[{"priority": value} for value in (None, 0, -1000, 1000)],
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    ],
)
def test_neutral_and_extreme_values_are_served(http: httpx.Client, fields: dict[str, Any]) -> None:
    """C23, C25, R19, X6."""
    assert http.post(CHAT, json=chat(**fields)).status_code == 200
    assert http.post(TEXT, json=text(**fields)).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", value) for value in (0, -1, 17, 5_000_000, 1.0, True, "1")],
        *[("stop", value) for value in ("", [""], ["a", ""], ["a"] * 5, "a" * 1_000_000, [1], 1)],
        *[("temperature", value) for value in (-0.1, 2.1, True, "1")],
        *[("top_p", value) for value in (-0.1, 1.1, True, "1")],
        *[("top_k", value) for value in (-2, 1.0, True, "1")],
        *[("response_format", v) for v in ("json", [], {}, {"type": "xml"}, {"type": 1})],
        *[
            ("response_format", {"type": "json_schema", "json_schema": value})
            for value in (None, "{}", {}, {"schema": []}, {"schema": {"type": "nothing"}})
        ],
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"if": {}}}}),
        *[("response_format", {"type": t, "schema": {}}) for t in ("json_schema", "json_object")],
        *[("guided_json", value) for value in (1, "{", "[]", [], {"$ref": "http://a/b"})],
        *[("guided_regex", value) for value in ("", "((", 1, ["a"], "a" * 70_000)],
        *[("guided_choice", value) for value in ("a", [], [""], [1], ["a"] * 1001)],
        *[("guided_grammar", value) for value in ("", "start: nothing", "?", 1)],
        *[("min_p", value) for value in (-0.1, 1.1, True, "1")],
        *[("presence_penalty", value) for value in (-2.1, 2.1, True, False, "1")],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, True, False, "1")],
        *[("repetition_penalty", value) for value in (0, -1, 101, True, "1")],
        *[("prompt_logprobs", value) for value in (-1, 21, 10**9, 1.0, True, "1")],
        *[("logit_bias", value) for value in ([], "a", 1, {"191222": -100}, {"258": 5})],
        *[("logit_bias", {key: 1}) for key in ("a", "-1", "1.0", "01", "", "²", "9" * 400)],
        *[("logit_bias", {"1": value}) for value in (101, -101, None, "1", True, [], 10**400)],
        ("logit_bias", {str(token): 1 for token in range(301)}),
        *[("bad_words", value) for value in ("a", [""], [1], ["a"] * 33, ["a" * 129])],
        *[("seed", value) for value in (2**64, -(2**63) - 1, 1.0, True, "1")],
        *[("max_tokens", value) for value in (0, -1, 1.5, 1.0, True, "5", [], {})],
        *[("min_tokens", value) for value in (-1, 1.0, True, "5", 51)],
        *[
            ("stop_token_ids", v)
            for v in ([-1], [258], [299], [300], [HUGE], [True], [1.5], ["7x"])
        ],
        *[("allowed_token_ids", v) for v in ([-1], [258], [300], [2**31], [HUGE], [True], [1.5])],
        ("allowed_token_ids", []),
        ("stop_token_ids", [1] * 17),
        ("stop_token_ids", 1),
        *[("ignore_eos", value) for value in (1, "true")],
        *[("skip_special_tokens", value) for value in (1, "true")],
        *[("stream", value) for value in (1, "true")],
        ("stream_options", []),
        *[("priority", value) for value in (-1001, 1001, 10**20, 1.0, True, "1", [])],
    ],
)
def test_wrong_values_are_refused_by_name(
    http: httpx.Client, backend: TextBackend, field: str, value: object
) -> None:
    """C07, C22, C23, C25, R16: nothing of it reaches the engine."""
    for path, body in ((CHAT, chat()), (TEXT, text())):
        error = refused(http.post(path, json={"max_tokens": 50, **body, field: value}))
        assert error["param"].split(".")[0] == field
        assert field in error["message"]
    assert backend.generations == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "max_tokens", "presence_penalty", "n", "logprobs"]
)
def test_numbers_that_json_has_not_are_refused(http: httpx.Client, field: str, number: str) -> None:
    """R14, X10."""
    body = json.dumps(chat())[:-1] + f', "{field}": {number}}}'
    headers = {"Content-Type": "application/json"}
    refused(http.post(CHAT, content=body, headers=headers))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["audio"]),
        ("structured_outputs", {"choice": ["a", "b"]}),
        ("json_schema", {"type": "object"}),
        ("use_beam_search", True),
        ("add_generation_prompt", False),
    ],
)
def test_what_would_change_a_chat_answer_is_refused(
    http: httpx.Client, field: str, value: object
) -> None:
    """HangDetector would tell a client that it was honoured."""
    error = refused(http.post(CHAT, json=chat(**{field: value})))
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)


def test_a_suffix_is_refused(http: httpx.Client) -> None:
    error = refused(http.post(TEXT, json=text(suffix="end")))
    assert (error["code"], error["param"]) == ("unsupported_parameter", "suffix")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_bias_is_a_number(http: httpx.Client, number: str) -> None:
    """R14."""
    body = json.dumps(chat())[:-1] + f', "logit_bias": {{"1": {number}}}}}'
    headers = {"Content-Type": "application/json"}
    refused(http.post(CHAT, content=body, headers=headers))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *[(CHAT, {"logprobs": value}, "logprobs") for value in (1, 0, "true")],
        *[
            (CHAT, {"logprobs": True, "top_logprobs": value}, "top_logprobs")
            for value in (-1, 21, 10**9, 1.0, True, "1")
        ],
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        *[(TEXT, {"logprobs": value}, "logprobs") for value in (-1, 21, 10**9, 1.0, True, "1")],
        *[(TEXT, {"best_of": value}, "best_of") for value in (0, -1, 17, 1.0, True, "1")],
        (TEXT, {"best_of": 1, "n": 2}, "best_of"),
        (TEXT, {"best_of": 2, "stream": True}, "best_of"),
        (TEXT, {"echo": 1}, "echo"),
        (TEXT, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        (CHAT, {"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens"),
        (CHAT, {"guided_json": {}, "ignore_eos": True}, "ignore_eos"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_wrong_values_of_one_endpoint_are_refused_by_name(
    http: httpx.Client, backend: TextBackend, path: str, fields: dict[str, Any], param: str
) -> None:
    """C22, C23."""
    body = chat(**fields) if path == CHAT else text(**fields)
    error = refused(http.post(path, json=body))
    assert error["param"] == param
    assert param in error["message"]
    assert backend.generations == []


def test_best_of_n_is_served(http: httpx.Client) -> None:
    assert http.post(TEXT, json=text(best_of=2, n=2, suffix="")).status_code == 200


def test_unknown_fields_are_ignored_and_told_once(
    http: httpx.Client, backend: TextBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """R19, C38: a typing error shows in the log; a salt in the body has no effect."""
    with caplog.at_level(logging.WARNING, "serve_app"):
        for _ in range(2):
            body = chat(max_token=1, cache_salt="victim", store=True, service_tier="auto")
            assert http.post(CHAT, json=body).status_code == 200
    told = [record.getMessage() for record in caplog.records]
    assert sorted(told) == [
        "ignored the unknown request field 'cache_salt'",
        "ignored the unknown request field 'max_token'",
    ]
    assert {generation.tenant.cache_salt for generation in backend.generations} == {"tenant:acme"}


def test_unknown_names_are_kept_within_bounds(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "serve_app"):
        body = chat(**{f"{index}" + "x" * 500: 1 for index in range(1500)})
        assert http.post(CHAT, json=body).status_code == 200
    assert 0 < len(caplog.records) <= 1000
    assert max(len(record.getMessage()) for record in caplog.records) < 200


@pytest.mark.parametrize("name", ["other", "", None, "TEXT", "x" * 1_000_000, "secret-name"])
def test_an_unknown_model_is_not_found(http: httpx.Client, name: str | None) -> None:
    """R22: its name is not repeated."""
    for path, body in ((CHAT, chat(model=name)), (TEXT, text(model=name))):
        reply = http.post(path, json=body)
        error = refused(reply, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "secret-name" not in reply.text


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_a_model_must_be_named(http: httpx.Client, path: str) -> None:
    body = {CHAT: chat(), TEXT: text(), "/tokenize": text(), "/detokenize": {"tokens": [1]}}[path]
    body.pop("model", None)
    error = refused(http.post(path, json=body))
    assert (error["type"], error["param"]) == ("invalid_request_error", "model")


def test_messages_are_bounded_in_number(http: httpx.Client) -> None:
    """As OpenAI's are: writing hundreds of thousands down takes seconds."""
    turn = {"role": "user", "content": ""}
    error = refused(http.post(CHAT, json=chat(messages=[turn] * 2049)))
    assert error["param"] == "messages"
    most = [{"role": "user", "content": "hello"}, *[turn] * 2047]
    assert http.post(CHAT, json=chat(messages=most)).status_code == 200


def test_an_unlimited_chat_answer_has_a_default(http: httpx.Client) -> None:
    """C31: min(default, room); the default of these tests is 50."""
    for length, expected in ((100, 50), (190, 10)):
        body = chat(messages=[{"role": "user", "content": "a" * length}], ignore_eos=True)
        assert http.post(CHAT, json=body).json()["usage"]["completion_tokens"] == expected


def test_the_newer_name_of_max_tokens_goes_first(http: httpx.Client) -> None:
    reply = http.post(CHAT, json=chat(max_tokens=4, max_completion_tokens=2))
    assert reply.json()["usage"]["completion_tokens"] == 2
    error = refused(http.post(CHAT, json=chat(max_tokens=4, max_completion_tokens="2")))
    assert error["param"] == "max_completion_tokens"


@pytest.mark.parametrize("field", ["messages", "prompt", "stop", "user", "model", "metadata"])
def test_half_a_character_is_refused_everywhere(http: httpx.Client, field: str) -> None:
    """X3."""
    path, good = (TEXT, text()) if field == "prompt" else (CHAT, chat())
    half = '"\\ud83d"'
    values = {
        "messages": f'[{{"role": "user", "content": {half}}}]',
        "stop": f"[{half}]",
        "metadata": f'{{"a": {half}}}',
    }
    body = json.dumps(good)[:-1] + f', "{field}": {values.get(field, half)}}}'
    headers = {"Content-Type": "application/json"}
    refused(http.post(path, content=body, headers=headers))
    raw = body.replace("\\ud83d", "\udc3d").encode("utf-8", "surrogatepass")
    refused(http.post(path, content=raw, headers=headers))


@pytest.mark.parametrize("count", [300, 12_000])
def test_many_faults_make_a_small_answer(
    http: httpx.Client, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """C26: nothing of the input in it, nor in the log."""
    parts = [{"type": "image_url", "image_url": {"url": "SECRET" * 10}}] * count
    bad_turns = [{"role": "SECRET", "content": 5}] * count
    with caplog.at_level(logging.DEBUG):
        for messages in ([{"role": "user", "content": parts}], bad_turns):
            reply = http.post(CHAT, json=chat(messages=messages))
            error = refused(reply)
            assert error["message"].count(";") < 10
            assert "SECRET" not in reply.text
    assert "SECRET" not in caplog.text


def test_many_different_faults_make_a_small_answer(http: httpx.Client) -> None:
    """C26."""
    names = (
        *("n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos"),
        *("min_tokens", "stream", "user", "skip_special_tokens", "stream_options", "echo"),
    )
    error = refused(http.post(TEXT, json=text(**{name: {"a": "SECRET"} for name in names})))
    assert error["message"].count(";") == 9
    assert "SECRET" not in error["message"]


@pytest.mark.parametrize("fault", [{"n": 0}, {"stop": [""]}, {"messages": []}, {"max_tokens": 0}])
def test_a_bad_request_for_a_stream_has_a_status(
    http: httpx.Client, fault: dict[str, object]
) -> None:
    """R23."""
    reply = http.post(CHAT, json=chat(stream=True) | fault)
    refused(reply)
    assert reply.headers["content-type"] == "application/json"


def test_stream_options_need_a_stream(http: httpx.Client) -> None:
    refused(http.post(CHAT, json=chat(stream_options={"include_usage": True})))


def test_a_bad_request_is_refused_fast_and_disturbs_nobody(
    http: httpx.Client, site: Any, backend: TextBackend
) -> None:
    """C23."""
    backend.delay_s = 0.01
    bodies = [chat(top_logprobs=10**9), chat(n=5_000_000), text(prompt=[10**9])]
    gaps: list[float] = []

    def read_a_stream() -> None:
        with httpx.stream(
            "POST", site.url + CHAT, json=chat(stream=True, ignore_eos=True), headers=http.headers
        ) as reply:
            last = time.monotonic()
            for _ in reply.iter_raw():
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

    reader = threading.Thread(target=read_a_stream)
    reader.start()
    for body in bodies:
        path = TEXT if "prompt" in body else CHAT
        seconds = []
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(5):
            start = time.monotonic()
            refused(http.post(path, json=body))
            seconds.append(time.monotonic() - start)
        assert min(seconds) < 0.05
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_240  # KiB
    reader.join()
    assert len(gaps) > 40
    assert sorted(gaps)[len(gaps) // 2] < 0.05


def test_the_probes_need_no_model(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}

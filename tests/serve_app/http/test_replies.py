from __future__ import annotations

import json

import msgspec
import pytest

from replica.messages import TokenLogprobs
from serve_app.http.choices import Piece
from serve_app.http.formats import ChatFormat, CompletionFormat, Echo, ShownLogprobs
from serve_app.http.replies import DONE, PromptDetails, Reply, Usage, error_event
from serve_app.text.call_forms import HERMES
from serve_app.text.logprobs import ShownToken
from serve_app.text.reasoning import ReasoningTags
from serve_app.text.token_texts import TokenTexts
from serve_app.text.tool_calls import ToolCallReader
from tests.serve_app.sse import events, texts
from tests.serve_app.text_backend import byte_tokenizer

TEXTS = TokenTexts(byte_tokenizer().backend_tokenizer)
SILENT = ShownLogprobs(TEXTS)
USAGE = Usage(3, 4, 7, PromptDetails(1))
PIECES = [
    Piece(1, "b", None),
    Piece(0, "a\n\n", None),
    Piece(0, "", "length"),
    Piece(1, "c", "stop"),
]


def test_a_whole_answer_joins_its_pieces_in_the_order_of_choices() -> None:
    body = json.loads(Reply(ChatFormat(SILENT), "m").whole(PIECES, [(1,), (2,)], USAGE))
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a\n\n", "bc"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop"]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_events_are_the_same_text() -> None:
    writer = Reply(CompletionFormat(SILENT), 'a "model"').events(include_usage=True)
    body = writer.pieces(PIECES[:2]) + writer.pieces(PIECES[2:]) + writer.closing(USAGE)
    *chunks, last, done = events(body.decode())
    assert texts(chunks) == {0: "a\n\n", 1: "bc"}
    assert {chunk["model"] for chunk in [*chunks, last]} == {'a "model"'}
    assert (last["choices"], last["usage"]["total_tokens"], done) == ([], 7, "[DONE]")


@pytest.mark.parametrize(
    "endpoint", [ChatFormat(SILENT), CompletionFormat(SILENT, [Echo("echo ", ())])]
)
def test_a_choice_opens_once(endpoint: ChatFormat | CompletionFormat) -> None:
    writer = Reply(endpoint, "m").events(include_usage=False)
    assert len(events(writer.pieces([Piece(0, "", None)]).decode())) == 1
    assert len(events(writer.pieces([Piece(0, "a", None)]).decode())) == 1


def test_nothing_is_written_for_nothing() -> None:
    assert Reply(CompletionFormat(SILENT), "m").events(False).pieces([Piece(0, "", None)]) == b""


def test_the_end_is_plain_without_usage() -> None:
    assert Reply(ChatFormat(SILENT), "m").events(include_usage=False).closing(USAGE) == DONE


def test_two_replies_have_two_ids() -> None:
    assert Reply(ChatFormat(SILENT), "m").id != Reply(ChatFormat(SILENT), "m").id


BREAKS = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e\r\n"
"""All that `str.splitlines` splits at."""


@pytest.mark.parametrize("endpoint", [ChatFormat, CompletionFormat])
def test_an_event_is_one_line_to_every_reader(
    endpoint: type[ChatFormat | CompletionFormat],
) -> None:
    writer = Reply(endpoint(SILENT), BREAKS).events(include_usage=True)
    body = (writer.pieces([Piece(0, BREAKS, "stop")]) + writer.closing(USAGE)).decode()
    sent = events(body)
    assert body.splitlines() == body.split("\n")[:-1]
    assert texts(sent) == {0: BREAKS}
    assert {chunk["model"] for chunk in sent[:-1]} == {BREAKS}


def test_so_are_thoughts_calls_and_log_probabilities() -> None:
    said = f"<think>a{BREAKS}b</think>" + HERMES.written(
        "f", json.dumps({BREAKS: BREAKS}, ensure_ascii=False)
    )
    endpoint = ChatFormat(
        ShownLogprobs(TEXTS, True), new_caller=ToolCallReader, reasoning=ReasoningTags()
    )
    told = [ShownToken(token, 0, TokenLogprobs(-1.0, (), ())) for token in "\u2028".encode()]
    body = Reply(endpoint, "m").events(False).pieces([Piece(0, said, "stop", tuple(told))]).decode()
    assert body.splitlines() == body.split("\n")[:-1]
    delta = events(body)[1]["choices"][0]["delta"]
    assert delta["reasoning_content"] == f"a{BREAKS}b"
    assert json.loads(delta["tool_calls"][0]["function"]["arguments"]) == {BREAKS: BREAKS}


def test_so_is_an_error() -> None:
    body = error_event(msgspec.json.encode({"error": BREAKS})).decode()
    assert body.splitlines() == body.split("\n")[:-1]
    assert events(body) == [{"error": BREAKS}]


def test_an_error_event_is_its_body() -> None:
    assert events(error_event(b'{"error":{}}').decode()) == [{"error": {}}]

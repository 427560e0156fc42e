from __future__ import annotations

import json

import pytest

from serve_app.choices import Piece
from serve_app.replies import (
    DONE,
    ChatShape,
    CompletionShape,
    PromptDetails,
    Reply,
    Usage,
    error_event,
)
from tests.serve_app.sse import events, texts

USAGE = Usage(3, 4, 7, PromptDetails(1))
PIECES = [
    Piece(1, "b", None),
    Piece(0, "a\n\n", None),
    Piece(0, "", "length"),
    Piece(1, "c", "stop"),
]


def test_a_whole_answer_joins_its_pieces_in_the_order_of_choices() -> None:
    body = json.loads(Reply(ChatShape(), "m").whole(PIECES, USAGE))
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a\n\n", "bc"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop"]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_events_are_the_same_text() -> None:
    writer = Reply(CompletionShape(), 'a "model"').events(include_usage=True)
    body = writer.pieces(PIECES[:2]) + writer.pieces(PIECES[2:]) + writer.closing(USAGE)
    *chunks, last, done = events(body.decode())
    assert texts(chunks) == {0: "a\n\n", 1: "bc"}
    assert {chunk["model"] for chunk in [*chunks, last]} == {'a "model"'}
    assert (last["choices"], last["usage"]["total_tokens"], done) == ([], 7, "[DONE]")


@pytest.mark.parametrize("shape", [ChatShape(), CompletionShape(["echo "])])
def test_a_choice_opens_once(shape: ChatShape | CompletionShape) -> None:
    writer = Reply(shape, "m").events(include_usage=False)
    assert len(events(writer.pieces([Piece(0, "", None)]).decode())) == 1
    assert len(events(writer.pieces([Piece(0, "a", None)]).decode())) == 1


def test_nothing_is_written_for_nothing() -> None:
    assert Reply(CompletionShape(), "m").events(False).pieces([Piece(0, "", None)]) == b""


def test_the_end_is_plain_without_usage() -> None:
    assert Reply(ChatShape(), "m").events(include_usage=False).closing(USAGE) == DONE


def test_two_replies_have_two_ids() -> None:
    assert Reply(ChatShape(), "m").id != Reply(ChatShape(), "m").id


def test_an_error_event_is_its_body() -> None:
    assert events(error_event(b'{"error":{}}').decode()) == [{"error": {}}]

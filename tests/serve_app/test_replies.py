from __future__ import annotations

import json

import pytest

from serve_app.choices import Piece
from serve_app.replies import DONE, PromptDetails, Reply, Usage, error_event
from serve_app.shapes import ChatShape, CompletionShape, Echo, Telling
from serve_app.token_texts import TokenTexts
from tests.serve_app.sse import events, texts
from tests.serve_app.text import byte_tokenizer

TEXTS = TokenTexts(byte_tokenizer().backend_tokenizer)
SILENT = Telling(TEXTS)
USAGE = Usage(3, 4, 7, PromptDetails(1))
PIECES = [
    Piece(1, "b", None),
    Piece(0, "a\n\n", None),
    Piece(0, "", "length"),
    Piece(1, "c", "stop"),
]


def test_a_whole_answer_joins_its_pieces_in_the_order_of_choices() -> None:
    body = json.loads(Reply(ChatShape(SILENT), "m").whole(PIECES, [(1,), (2,)], USAGE))
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a\n\n", "bc"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop"]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_events_are_the_same_text() -> None:
    writer = Reply(CompletionShape(SILENT), 'a "model"').events(include_usage=True)
    body = writer.pieces(PIECES[:2]) + writer.pieces(PIECES[2:]) + writer.closing(USAGE)
    *chunks, last, done = events(body.decode())
    assert texts(chunks) == {0: "a\n\n", 1: "bc"}
    assert {chunk["model"] for chunk in [*chunks, last]} == {'a "model"'}
    assert (last["choices"], last["usage"]["total_tokens"], done) == ([], 7, "[DONE]")


@pytest.mark.parametrize("shape", [ChatShape(SILENT), CompletionShape(SILENT, [Echo("echo ", ())])])
def test_a_choice_opens_once(shape: ChatShape | CompletionShape) -> None:
    writer = Reply(shape, "m").events(include_usage=False)
    assert len(events(writer.pieces([Piece(0, "", None)]).decode())) == 1
    assert len(events(writer.pieces([Piece(0, "a", None)]).decode())) == 1


def test_nothing_is_written_for_nothing() -> None:
    assert Reply(CompletionShape(SILENT), "m").events(False).pieces([Piece(0, "", None)]) == b""


def test_the_end_is_plain_without_usage() -> None:
    assert Reply(ChatShape(SILENT), "m").events(include_usage=False).closing(USAGE) == DONE


def test_two_replies_have_two_ids() -> None:
    assert Reply(ChatShape(SILENT), "m").id != Reply(ChatShape(SILENT), "m").id


def test_an_error_event_is_its_body() -> None:
    assert events(error_event(b'{"error":{}}').decode()) == [{"error": {}}]

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve_app.backend import ServedModel
from serve_app.errors import ApiError
from serve_app.grammars import MAX_REASON, grammar_of
from serve_app.protocol import CompletionRequest

MODEL = ServedModel("text", 0, vocab_size=300, eos_token_ids=(256,), max_model_len=200)
SECRET = "secret" * 100


async def grammar(**fields: Any) -> str:
    request = CompletionRequest.model_validate({"model": "text", "prompt": "x", **fields})
    return await grammar_of(request, MODEL)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"guided_regex": f"({SECRET}"}, "unclosed group"),
        ({"guided_regex": f"(?={SECRET})a"}, "look-around"),
        ({"guided_grammar": f"start: FOO {SECRET}"}, "unknown name"),
        ({"guided_json": {"type": SECRET}}, "Invalid type"),
        ({"guided_json": {"not": {"type": "null"}}}, "not supported: [not]"),
        ({"guided_json": {"type": "string", "pattern": f"({SECRET}"}}, "unclosed group"),
    ],
)
async def test_the_reason_is_told_and_not_the_whole_grammar(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ApiError) as refused:
        await grammar(**fields)
    (name,) = fields
    assert refused.value.param == name
    assert reason in refused.value.message
    assert len(refused.value.message) <= MAX_REASON + 80


def accepts(made: str, text: str) -> bool:
    """Whether a whole text is a sentence of a grammar."""
    ids = list(text.encode())
    matcher = LLMatcher(LLTokenizer("byte"), made)
    return matcher.validate_tokens(ids) == len(ids) and (
        all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()
    )


@pytest.mark.parametrize(
    ("regex", "text", "fits"),
    [
        (r"\d+", "12", True),
        (r"\d+", "1\u0662", False),
        (r"\D", "\u0662", True),
        (r"\D", "1", False),
        (r"\w+", "a_1", True),
        (r"\w+", "\u00e9", False),
        (r"[\d.]+", "1.5", True),
        (r"[^\d]", "1", False),
        (r"\\d", "\\d", True),
        (r"\\d", "1", False),
    ],
)
async def test_classes_of_a_regex_are_of_ascii(regex: str, text: str, fits: bool) -> None:
    assert accepts(await grammar(guided_regex=regex), text) == fits

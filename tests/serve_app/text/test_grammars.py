from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from replica.sampling.grammars import LIMITS
from serve_app.protocol.backend import ServedModel
from serve_app.protocol.errors import ApiError
from serve_app.protocol.requests import CompletionRequest
from serve_app.text.grammar_trial import MAX_REASON, GrammarTrial
from serve_app.text.grammars import grammar_of

MODEL = ServedModel("text", 0, vocab_size=300, eos_token_ids=(256,), max_model_len=200)
SECRET = "secret" * 100


TRIAL = GrammarTrial()


async def grammar(**fields: Any) -> str:
    request = CompletionRequest.model_validate({"model": "text", "prompt": "x", **fields})
    return await grammar_of(request, MODEL, partial(TRIAL.error, "a"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"guided_regex": f"({SECRET}"}, "unclosed group"),
        ({"guided_regex": f"(?={SECRET})a"}, "look-around"),
        ({"guided_grammar": f"start: FOO {SECRET}"}, "unknown name"),
        ({"guided_json": {"type": SECRET}}, "Invalid type"),
        ({"guided_json": {"not": {"type": "null"}}}, "not supported: [not]"),
        ({"guided_json": {"type": "string", "pattern": f"({SECRET}"}}, "unclosed group"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"guided_json": {"enum": [float("nan")]}}, "expected value"),
        ({"guided_json": {"$ref": "#"}}, "it allows no text"),
        ({"guided_regex": "[^\\s\\S]"}, "it allows no text"),
        ({"guided_grammar": "start: start"}, "it allows no text"),
        ({"guided_grammar": "start: " + "(" * 30_000}, "too deeply nested"),
        ({"guided_regex": "(" * 30_000 + "a" + ")" * 30_000}, "nested"),
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
    matcher = LLMatcher(LLTokenizer("byte"), made, limits=LIMITS)
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


def chain(rules: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(rules)) + f'r{rules}: "a"'


BOMBS = {
    "overflows the stack": {"guided_grammar": chain(4000)},
    "fills the first mask for a second": {"guided_regex": "(a{1000}){900}"},
    "takes hours": {
        "guided_json": {
            "allOf": [{"type": "string", "pattern": f".*a.{{{i}}}"} for i in range(100)]
        }
    },
}


@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_grammar_that_ends_its_compiler_is_refused_and_harms_nobody(bomb: str) -> None:
    asked = [grammar(**BOMBS[bomb]), grammar(guided_regex="a+")]
    refused, other = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(refused, ApiError)
    assert (refused.status, refused.code) == (400, "grammar_too_complex")
    assert isinstance(other, str)
    assert accepts(other, "aa")


async def test_large_grammars_that_are_harmless_are_tried_in_time() -> None:
    nested: Any = {"type": "null"}
    for _ in range(60):
        nested = {"type": "array", "items": nested, "maxItems": 10**18}
    many = {"type": "object", "properties": {f"field{i}": {"type": "integer"} for i in range(200)}}
    assert accepts(await grammar(guided_json=nested), "[]")
    assert accepts(await grammar(guided_json=many), "{}")
    assert accepts(await grammar(guided_grammar=chain(100)), "a")
    assert accepts(await grammar(guided_choice=["a b#&~\n\0\"'", "</s>", "a"]), "a b#&~\n\0\"'")
    assert accepts(await grammar(guided_regex="^(yes|no)$"), "yes")

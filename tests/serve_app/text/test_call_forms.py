"""The forms of calls: what a grammar allows is what a reader reads, for every family."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from serve_app.protocol.conversation import Function
from serve_app.text.call_forms import FORMS, HERMES, LLAMA, MISTRAL, NEMO, CallForm, form_in
from serve_app.text.tool_calls import ToolCallReader
from serve_app.text.tool_grammar import tool_grammar
from tests.serve_app.text.test_tool_calls import ARGUMENTS, joined
from tests.serve_app.text_backend import byte_tokenizer

SPECIALS = ["[TOOL_CALLS]", "<|python_tag|>", "<tool_call>", "</tool_call>"]
ANY = {"type": "object"}
TOOLS = [Function(name=name, parameters=ANY) for name in ("f", "get_weather")]
NAMES = [tool.name for tool in TOOLS]


def with_specials() -> Tokenizer:
    tokenizer = byte_tokenizer().backend_tokenizer
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


TOKENIZER = with_specials()
FOLLOWED = LLTokenizer(
    TOKENIZER.to_str(), n_vocab=TOKENIZER.get_vocab_size(), eos_token=[256], slices=[]
)


def special(form: CallForm) -> CallForm:
    """As with a tokenizer that has tokens for pieces of the form."""
    text = form.mark + form.end
    ids = {one: TOKENIZER.token_to_id(one) for one in SPECIALS if one in text}
    return replace(form, special=tuple(ids.items()))


ALL = [pytest.param(form, id=f"{form.mark}{form.open}") for form in FORMS]
ALL += [pytest.param(special(form), id=f"token {form.mark}{form.open}") for form in FORMS]
FORM = pytest.mark.parametrize("form", ALL)


def text_of(form: CallForm, calls: Iterable[tuple[str, str]], *, mark: bool = True) -> str:
    made = [form.head + name + form.middle + arguments + form.end for name, arguments in calls]
    lead = form.mark if mark else ""
    return lead + form.open + form.between.join(made) + form.close if made else ""


def ids_of(form: CallForm, text: str, *, spelled: bool = False) -> list[int]:
    """As a model writes it: pieces of the form by their tokens, but for a first mark in letters."""
    if not form.special:
        return list(text.encode())
    before, mark, after = text.partition(form.mark) if spelled else ("", "", text)
    return [*(before + mark).encode(), *TOKENIZER.encode(after).ids]


def follows(grammar: str, ids: list[int]) -> bool:
    """Whether all of it is a sentence of the grammar, token by token."""
    matcher = LLMatcher(FOLLOWED, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    taken = all(matcher.validate_tokens([one]) and matcher.consume_token(one) for one in ids)
    return taken and matcher.is_accepting()


def begins(grammar: str, ids: list[int]) -> bool:
    return LLMatcher(FOLLOWED, grammar, log_level=0).validate_tokens(ids) == len(ids)


def read(form: CallForm, parts: Iterable[str], **options: Any) -> Any:
    reader = ToolCallReader(form, NAMES, **options)
    told = [reader.push(part, last=False) for part in parts]
    told.append(reader.push("", last=True))
    return *joined(told), reader.is_complete


CALLS = [[("f", "{}")], [("get_weather", '{"a": "}]"}'), ("f", '{"b": {"c": []}}')]]


@FORM
@pytest.mark.parametrize("calls", CALLS, ids=["one", "two"])
@pytest.mark.parametrize("content", ["", "I look: { ", " \n"])
@pytest.mark.parametrize("forced", [True, False], ids=["forced", "auto"])
def test_what_is_allowed_is_read(
    form: CallForm, calls: list[tuple[str, str]], content: str, forced: bool
) -> None:
    grammar = tool_grammar(TOOLS, form, forced=forced)
    marked = content + text_of(form, calls)
    allowed = len(calls) == 1 or not form.single
    assert follows(grammar, ids_of(form, marked)) == (
        allowed and not (forced and (content or form.bare))
    )
    assert follows(grammar, ids_of(form, marked, spelled=True)) == (
        allowed and not (forced and (content or form.bare or form.special))
    )
    if allowed:
        assert read(form, marked) == (content, calls, True)
    bare = content + text_of(form, calls, mark=False)
    if form.bare and not content.strip():
        assert follows(grammar, ids_of(form, bare)) == (allowed and not (forced and content))
        if allowed:
            assert read(form, bare) == ("", calls, True)
    elif not forced and form.mark not in form.between:
        assert follows(grammar, ids_of(form, bare))
        assert read(form, bare) == (bare, [], False)


@FORM
def test_behind_a_mark_there_is_nothing_but_a_call(form: CallForm) -> None:
    grammar = tool_grammar(TOOLS, form)
    for spelled in (True, False):
        assert begins(grammar, ids_of(form, form.mark + form.open + form.head, spelled=spelled))
        for other in ("hello", form.open + form.head + "nobody", "{}"):
            assert not begins(grammar, ids_of(form, form.mark + other, spelled=spelled))


@FORM
@pytest.mark.parametrize(
    "text",
    [
        "It is warm.",
        '{"name": "John"}',
        '{"name": "f"}',
        '{"name": "fa", "parameters": {}}',
        '{"name": "f", "arguments": {}}',
        ' {"name": "f", "parameters"',
        'see {"name": "f", "parameters": {}}',
        " " * 9 + '{"name": "f", "parameters": {}}',
        "[TOOL_CALL",
        "<|python_tag",
        "[]",
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_other_text_is_content(form: CallForm, text: str, size: int) -> None:
    assert follows(tool_grammar(TOOLS, form), list(text.encode()))
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(form, parts) == (text, [], False)


@given(
    st.sampled_from([form.values[0] for form in ALL]),
    st.sampled_from(["", "Let me see. ", "a < b <tool [TOOL", "日本\n"]),
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(ARGUMENTS)), min_size=1),
    st.booleans(),
    st.randoms(),
)
def test_calls_are_read_however_the_text_is_cut(
    form: CallForm, content: str, calls: list[tuple[str, str]], mark: bool, rng: Any
) -> None:
    calls = calls[:1] if form.single else calls
    mark = mark or bool(content) or not form.bare
    text = content + text_of(form, calls, mark=mark)
    parts, at = [], 0
    while at < len(text):
        size = rng.randint(1, 9)
        parts.append(text[at : at + size])
        at += size
    assert read(form, parts) == (content, calls, True)


@FORM
@pytest.mark.parametrize("only_calls", [True, False])
def test_an_answer_may_end_anywhere(form: CallForm, only_calls: bool) -> None:
    """Nothing of the form is told, but what may be other text; only what is complete is a call."""
    calls = [("f", '{"a": "b"}')] if form.single else [("f", '{"a": "b"}'), ("get_weather", "{}")]
    text = text_of(form, calls, mark=not (form.bare and only_calls))
    for cut in range(1, len(text) + 1):
        content, told, complete = read(form, text[:cut], only_calls=only_calls)
        assert content == ("" if only_calls or cut >= len(form.mark) else text[:cut])
        assert [name for name, _ in told] == [name for name, _ in calls[: len(told)]]
        for (_, arguments), (_, whole) in zip(told, calls, strict=False):
            assert whole.startswith(arguments)
        assert complete == (bool(told) and told[-1][1] == calls[len(told) - 1][1])


def test_text_that_begins_like_a_call_is_held_back_until_it_is_none() -> None:
    reader = ToolCallReader(LLAMA, NAMES)
    assert reader.push(' {"name": "get_', last=False) == ("", [])
    assert reader.push('up"', last=False) == (' {"name": "get_up"', [])
    assert reader.push('{"name": "f", "parameters": {', last=True)[1] == []


def test_beside_json_a_call_has_its_mark() -> None:
    """An answer of the schema may look like a call."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    form = special(LLAMA).marked()
    grammar = tool_grammar(TOOLS, form, schema=schema)
    answer = '{"name": "f", "parameters": {}}'
    assert follows(grammar, list(answer.encode()))
    assert read(form, answer) == (answer, [], False)
    assert follows(grammar, ids_of(form, "<|python_tag|>" + answer))
    assert read(form, "<|python_tag|>" + answer) == ("", [("f", "{}")], True)


@FORM
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_mark_within_json_is_text(form: CallForm, size: int) -> None:
    """An answer of a schema begins with a call, or has none."""
    form = form.marked()
    grammar = tool_grammar(TOOLS, form, schema={"type": "string"})
    call = text_of(form, [("f", "{}")])
    answer = json.dumps(f"so: {call}")
    assert follows(grammar, list(answer.encode()))
    assert follows(grammar, ids_of(form, call))
    for text, told in ((answer, (answer, [], False)), (call, ("", [("f", "{}")], True))):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(form, parts, only_first=True) == told


def test_a_form_is_found_in_what_a_template_writes() -> None:
    for form in (HERMES, MISTRAL, NEMO, LLAMA):
        assert form_in("x" + form.written("f", "{}") + "y", "f", "{}") is form
    assert form_in('f({"a": 1})', "f", '{"a": 1}') is None

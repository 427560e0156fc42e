"""Chat templates of real families, by their structure: a whole conversation is in the prompt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from serve_app.protocol.conversation import Function, Message
from serve_app.protocol.errors import ApiError
from serve_app.text.call_forms import HERMES, LLAMA, MISTRAL, NEMO
from serve_app.text.chat import PromptEncoder
from serve_app.text.templates import templates_of
from tests.serve_app.text_backend import byte_tokenizer

FOLDER = Path(__file__).parent / "chat_templates"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
LOSES_TEXT_BESIDE_CALLS = {"mistral-7b-v0.3", "mistral-nemo"}
WEATHER = Function.model_validate(
    {
        "name": "get_weather",
        "description": "The weather there.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
)


def tokenizer(template: Any) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.backend_tokenizer.add_special_tokens(["[TOOL_CALLS]", "<|python_tag|>"])
    made.bos_token = "<pad>"
    made.chat_template = template
    return made


def of_family(family: str) -> PreTrainedTokenizerFast:
    return tokenizer((FOLDER / f"{family}.jinja").read_text())


def call(number: int, arguments: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": f"call_{number:032x}", "type": "function", "function": function}


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number:032x}", "content": content}


SYSTEM = {"role": "developer", "content": "Be brief."}
QUESTION = {
    "role": "user",
    "content": [{"type": "text", "text": "Bonn or"}, {"type": "text", "text": "Rome?"}],
}
CALLS = {
    "role": "assistant",
    "content": "Two calls.",
    "tool_calls": [call(0, '{"city": "Bonn"}'), call(1, '{"city": "Köln"}')],
}
RESULTS = [result(1, "cold there"), result(0, "warm here")]
ANSWER = {"role": "assistant", "content": "Bonn, then."}
SAID = ["Be brief.", "Bonn or\nRome?", "get_weather", '"Bonn"', "Köln", "warm here", "cold there"]


async def prompt(
    encoder: PromptEncoder, turns: list[dict[str, Any]], tools: list[Function] | None = None
) -> str:
    messages = [Message.model_validate(turn) for turn in turns]
    return (await encoder.chat(messages, 100_000, tools or []))[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("offered", [True, False])
async def test_a_whole_conversation_is_written(family: str, offered: bool) -> None:
    """With parts, two calls in a turn, ids of ours, and as an agent sends it, between and behind
    the answers."""
    encoder = PromptEncoder(of_family(family))
    turns = [SYSTEM, QUESTION, CALLS, *RESULTS]
    tools = [WEATHER] if offered else []
    said = [*SAID, *(["The weather there."] if offered else [])]
    if family not in LOSES_TEXT_BESIDE_CALLS:
        said.append("Two calls.")
    text = await prompt(encoder, turns, tools)
    assert [word for word in said if word not in text] == []
    text = await prompt(encoder, [*turns, ANSWER, {"role": "user", "content": "Why?"}], tools)
    assert [word for word in [*said, "Bonn, then.", "Why?"] if word not in text] == []
    for once in ("Be brief.", "Two calls.", "warm here", "cold there"):
        assert text.count(once) <= 1


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_conversation_may_have_any_common_shape(family: str) -> None:
    encoder = PromptEncoder(of_family(family))
    hi, there = {"role": "user", "content": "Hi"}, {"role": "user", "content": "There"}
    assert "Hi" in await prompt(encoder, [hi])
    text = await prompt(encoder, [hi, there])
    assert text.index("Hi") < text.index("There")
    text = await prompt(encoder, [SYSTEM, SYSTEM | {"content": "Be kind."}, hi, ANSWER, there])
    assert all(word in text for word in ("Be brief.", "Be kind.", "Hi", "Bonn, then.", "There"))
    cut = {"role": "assistant", "content": None, "tool_calls": [call(0, '{"city": "Bon')]}
    text = await prompt(encoder, [hi, cut, result(0, "no JSON"), ANSWER, there], [WEATHER])
    assert all(word in text for word in ("Hi", "Bon", "no JSON", "Bonn, then.", "There"))


@pytest.mark.parametrize("family", FAMILIES)
async def test_whatever_an_answer_holds_is_taken_back(family: str) -> None:
    encoder = PromptEncoder(of_family(family))
    given = ["{}", '{"city": "Bonn"}', '{"city": "Bo', "[1]", "null", '"}"', '{"a": {"b": [null]}}']
    for content in (None, "", "So </s> be it.\n"):
        for count in range(4):
            for arguments in given if count else [""]:
                made: dict[str, Any] = {"role": "assistant", "content": content}
                made["tool_calls"] = [call(number, arguments) for number in range(count)] or None
                made["reasoning_content"] = "Hm." if count % 2 else None
                results = [result(number, f"told {number}") for number in range(count)]
                turns = [QUESTION, made, *results]
                text = await prompt(encoder, turns, [WEATHER])
                assert all(text.count(f"told {number}") == 1 for number in range(count))
                await prompt(encoder, [*turns, ANSWER, QUESTION], [WEATHER])


async def test_qwen_3_is_given_the_thoughts_of_this_turn() -> None:
    encoder = PromptEncoder(of_family("qwen3"))
    thinks = {**CALLS, "reasoning_content": "Hm, both."}
    text = await prompt(encoder, [QUESTION, thinks, *RESULTS], [WEATHER])
    assert "<think>\nHm, both.\n</think>" in text


async def test_names_are_passed_on() -> None:
    """That of a result is the function's."""
    source = "{% for m in messages %}[{{ m.name }}:{{ m.content }}]{% endfor %}"
    encoder = PromptEncoder(tokenizer(source))
    hi = {"role": "user", "content": "Hi", "name": "ada"}
    text = await prompt(encoder, [hi, CALLS, *RESULTS])
    assert "[ada:Hi]" in text
    assert "[get_weather:warm here]" in text


@pytest.mark.parametrize("family", ["mistral-7b-v0.3", "mistral-nemo"])
async def test_ids_are_the_same_nine_characters_in_call_and_result(family: str) -> None:
    encoder = PromptEncoder(of_family(family))
    turns = [QUESTION, CALLS, *RESULTS]
    text = await prompt(encoder, turns, [WEATHER])
    made = re.findall(r'"id": "([a-zA-Z0-9]{9})"', text)
    answered = re.findall(r'"call_id": "([a-zA-Z0-9]{9})"', text)
    assert answered == made[::-1]
    assert len(set(made)) == 2
    assert text == await prompt(encoder, turns, [WEATHER])
    own = {**CALLS, "tool_calls": [CALLS["tool_calls"][0] | {"id": "AbCdEf012"}]}
    back = {**RESULTS[1], "tool_call_id": "AbCdEf012"}
    assert (await prompt(encoder, [QUESTION, own, back])).count('"AbCdEf012"') == 2


@pytest.mark.parametrize("family", FAMILIES)
async def test_ids_may_be_missing(family: str) -> None:
    """Some clients pair calls and results by their order."""
    encoder = PromptEncoder(of_family(family))
    calls = [{"type": "function", "function": one["function"]} for one in CALLS["tool_calls"]]
    results = [{"role": "tool", "content": one["content"]} for one in RESULTS]
    text = await prompt(encoder, [QUESTION, {**CALLS, "tool_calls": calls}, *results])
    assert all(text.count(word) == 1 for word in ("warm here", "cold there"))


async def test_llama_gets_one_call_at_a_time_each_with_its_result() -> None:
    encoder = PromptEncoder(of_family("llama-3.1"))
    text = await prompt(encoder, [QUESTION, CALLS, *RESULTS], [WEATHER])
    places = [text.rindex(word) for word in ("Two calls.", '"Bonn"', "warm", "Köln", "cold")]
    assert places == sorted(places)


FORMS = {
    "llama-3.1": LLAMA,
    "mistral-7b-v0.3": MISTRAL,
    "mistral-nemo": NEMO,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_of_calls_is_that_of_the_template(family: str) -> None:
    form = PromptEncoder(of_family(family)).call_form
    expected = FORMS.get(family, HERMES)
    assert (form.mark, form.open, form.middle) == (expected.mark, expected.open, expected.middle)
    assert [text for text, _ in form.special] == ([expected.mark] if family in FORMS else [])


PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"


async def test_content_that_is_read_in_parts_comes_in_parts() -> None:
    text = await prompt(PromptEncoder(tokenizer(PARTS)), [SYSTEM, QUESTION, ANSWER])
    assert text == "Be brief.Bonn or\nRome?Bonn, then."


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ bos_token }}", "leaves out what the user says"),
        ("{{ raise_exception('I take nothing') }}", "refuses a conversation .I take nothing"),
        ("{{ messages.nothing.there }}", "refuses a conversation .UndefinedError"),
        ("{% if %}", "refuses a conversation .TemplateSyntaxError"),
        ({"rag": ALL, "tool_use": ALL}, "templates named rag, tool_use, and no default"),
        ({"default": ALL, "tool_use": "x"}, "leaves out"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_at_the_start(template: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PromptEncoder(tokenizer(template))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[-1].content }}", "leaves out .*earlier answers"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "answers"),
        ("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", "leaves out"),
    ],
)
async def test_a_template_of_a_single_message_is_given_nothing_else(
    template: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as those of models that judge one message."""
    encoder = PromptEncoder(tokenizer(template))
    assert re.search(reason, caplog.text)
    assert await prompt(encoder, [QUESTION]) == "Bonn or\nRome?"
    for turns, tools in (
        ([SYSTEM, QUESTION], []),
        ([QUESTION, ANSWER, QUESTION], []),
        ([ANSWER], []),
        ([QUESTION], [WEATHER]),
    ):
        with pytest.raises(ApiError, match="conversation: it takes a single message of the user"):
            await prompt(encoder, turns, tools)


@pytest.mark.parametrize(
    ("templates", "plain", "with_tools"),
    [
        ({"default": "d" + ALL, "tool_use": "t" + ALL}, "d", "t"),
        ({"default": "d" + ALL}, "d", "d"),
        ({"tool_use": "t" + ALL}, "t", "t"),
        ({"anything": "a" + ALL}, "a", "a"),
        ({"default": "d" + ALL, "rag": "r" + ALL}, "d", "d"),
    ],
)
async def test_one_of_several_templates_is_chosen(
    templates: dict[str, str], plain: str, with_tools: str
) -> None:
    encoder = PromptEncoder(tokenizer(templates))
    assert (await prompt(encoder, [QUESTION]))[0] == plain
    assert (await prompt(encoder, [QUESTION], [WEATHER]))[0] == with_tools
    assert (await prompt(encoder, [QUESTION, CALLS, *RESULTS]))[0] == with_tools


@pytest.mark.parametrize(
    ("call_source", "expected"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Bonn"}'),
        ("{{ c.function.arguments }}", '{"city": "Bonn"}'),
        ("{{ '' + c.function.arguments }}", '{"city": "Bonn"}'),
        (
            "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}",
            "<city>Bonn",
        ),
    ],
)
async def test_arguments_are_an_object_or_text_as_the_template_takes_them(
    call_source: str, expected: str
) -> None:
    source = (
        "{{ tools }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}" + call_source + "{% endfor %}"
        "{% endfor %}"
    )
    encoder = PromptEncoder(tokenizer(source))
    text = await prompt(encoder, [QUESTION, CALLS, *RESULTS], [WEATHER])
    assert "get_weather" + expected in text
    cut = {"role": "assistant", "content": "", "tool_calls": [call(0, '{"city": "Bon')]}
    assert "get_weather" in await prompt(encoder, [QUESTION, cut, RESULTS[1]])


async def test_the_client_is_told_why_a_template_refuses(caplog: pytest.LogCaptureFixture) -> None:
    """The log tells the rest, once. Neither has what marks a client's special tokens."""
    source = ALL + (
        "{% if 'odd' in messages[0].content %}{{ raise_exception(messages[0].content) }}{% endif %}"
        "{% if 'bug' in messages[0].content %}{{ messages.nothing.there }}{% endif %}"
    )
    encoder = PromptEncoder(tokenizer(source))

    async def refusal(content: str) -> str:
        with pytest.raises(ApiError) as refused:
            await prompt(encoder, [{"role": "user", "content": content}])
        assert refused.value.status == 400
        assert refused.value.__suppress_context__
        return refused.value.message

    told = await refusal("odd</s>" + "x" * 1000)
    assert ": odd</s>xxx" in told
    assert len(told) < 300
    assert not re.search("[0-9a-f]{3}", told.replace("odd</s>", ""))
    assert (await refusal("bug")).endswith("refuses the conversation.")
    await refusal("bug")
    assert caplog.text.count("UndefinedError") == 1
    assert "odd</s>" in caplog.text


def test_without_a_template_there_is_nothing_to_try() -> None:
    made = byte_tokenizer()
    made.chat_template = None
    assert templates_of(made) is None

"""Calls in a model's own form, whose marks are tokens of their own: a real engine, OpenAI's client.

The tokenizer has two tokens more than the model, and the model rows without a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.models import VOCAB_SIZE, byte_tokenizer, random_model
from tests.serve_app.conftest import KEY
from tests.serve_app.http.test_structured_output import TOOLS
from tests.serve_app.tiny_site import NAME, arguments, tiny_site

FOLDER = Path(__file__).parent / "chat_templates"
MARKS = ["[TOOL_CALLS]", "<|python_tag|>"]
MARK_ID = {"mistral-nemo": VOCAB_SIZE, "llama-3.1": VOCAB_SIZE + 1}
CHOSEN = {"type": "function", "function": {"name": "weather"}}
ASKED = [{"role": "user", "content": "How warm is it?"}]


@pytest.fixture(scope="module", params=sorted(MARK_ID))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.add_special_tokens([*MARKS, "<beyond>"])
    tokenizer.backend_tokenizer.add_tokens(["weather"])
    tokenizer.chat_template = (FOLDER / f"{family}.jinja").read_text()
    model = random_model(seed=3, vocab_size=VOCAB_SIZE + 2, max_position_embeddings=2048)
    with (
        tiny_site(model, tmp_path_factory.mktemp("tiny"), tokenizer) as site,
        openai.OpenAI(base_url=f"{site.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


def answers(client: openai.OpenAI, **fields: Any) -> Iterator[Any]:
    """The choice, plain and streamed."""
    body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 200, "seed": 5, **fields}
    yield client.chat.completions.create(model=NAME, **arguments(body)).choices[0]
    with client.chat.completions.stream(model=NAME, **arguments(body)) as stream:
        yield stream.get_final_completion().choices[0]


def check(choice: Any) -> list[Any]:
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    for call in calls:
        made = json.loads(call.function.arguments)
        assert made in ([{}] if call.function.name == "now" else [{"city": c} for c in CITIES])
    return calls


CITIES = ("Bonn", "Rome")


@pytest.mark.parametrize("choice", ["required", CHOSEN])
def test_forced_calls_have_the_models_form(client: openai.OpenAI, choice: Any) -> None:
    for answer in answers(client, tool_choice=choice):
        calls = check(answer)
        if choice == CHOSEN:
            assert [call.function.name for call in calls] == ["weather"]


def test_a_call_that_begins_with_its_token_is_read(client: openai.OpenAI, family: str) -> None:
    """The token is no text, unless a client asks for it, and then it is in no call."""
    bias = {str(MARK_ID[family]): 100}
    for shown in (None, True, False):
        fields = {} if shown is None else {"skip_special_tokens": shown}
        for answer in answers(client, logit_bias=bias, **fields):
            check(answer)
    body = {"messages": ASKED, "max_tokens": 3, "logit_bias": bias, "seed": 5}
    free = client.chat.completions.create(model=NAME, **arguments(body)).choices[0]
    assert free.message.content == ""


def test_an_agent_goes_on(client: openai.OpenAI, family: str) -> None:
    """With the calls and their ids as they came, however many there are."""
    turns: list[Any] = list(ASKED)
    for _ in range(3):
        *_, answer = answers(client, messages=turns, tool_choice="required")
        made = answer.message.tool_calls
        if family == "llama-3.1":
            assert len(made) == 1
        turns.append(answer.message.model_dump(exclude_none=True))
        turns += [{"role": "tool", "tool_call_id": one.id, "content": "1"} for one in made]
    calls = [{**turns[1]["tool_calls"][0], "id": f"call_{number}"} for number in range(2)]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": "1"} for n in range(2)]
    turns = [*ASKED, {"role": "assistant", "content": "Two.", "tool_calls": calls}, *results]
    for answer in answers(client, messages=turns, tool_choice="none", tools=TOOLS):
        assert answer.message.tool_calls is None


def test_other_structured_output_works(client: openai.OpenAI) -> None:
    body = {"messages": ASKED, "max_tokens": 40, "guided_regex": "(weather|<beyond>)+"}
    answer = client.chat.completions.create(model=NAME, **arguments(body)).choices[0]
    assert answer.message.content.startswith(("weather", "<beyond>"))

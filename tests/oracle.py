"""ORACLE: the same weights through transformers, one request at a time, nothing clever."""

from __future__ import annotations

import random
from functools import cached_property

import torch

from replica.config import EngineConfig
from replica.model.cpu.pack import choose, pack
from replica.model.loading import load_decoder
from replica.model.runner import DecoderRunner


def prompts(seed: int, count: int = 16) -> list[tuple[int, ...]]:
    """1 to 100 tokens; some share a prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(60)]
    made = []
    for number in range(count):
        own = [rng.randrange(256) for _ in range(rng.choice([1, 3, 4, 5, 8, 17, 40]))]
        made.append(tuple(shared[: rng.choice([7, 16, 33, 60])] + own if number % 2 else own))
    return made


class Oracle:
    """Greedy continuations of transformers' `generate`, remembered by prompt."""

    def __init__(self, folder: str, longest: int) -> None:
        self.folder = folder
        self._longest = longest
        self._known: dict[tuple[int, ...], list[int]] = {}

    @cached_property
    def model(self):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def greedy(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """Up to `count` ids; ends behind the first end-of-sequence id."""
        if prompt not in self._known:
            with torch.inference_mode():
                ids = self.model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=self._longest,
                    do_sample=False,
                    pad_token_id=0,
                )
            self._known[prompt] = ids[0, len(prompt) :].tolist()
        assert count <= self._longest
        return self._known[prompt][:count]


def decoder_runner(
    folder: str, num_blocks: int, block_size: int, *, poison: bool = True
) -> DecoderRunner:
    """A real model behind the seam. With `poison`, its KV pool starts full of NaN."""
    decoder = load_decoder(folder, None, torch.float32, torch.device("cpu"))
    pack(decoder, choose(torch.float32, EngineConfig.cache_dir))
    runner = DecoderRunner(decoder, num_blocks, block_size)
    if poison:
        runner.cache.layers.fill_(torch.nan)
    return runner

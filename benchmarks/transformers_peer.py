"""transformers on the CPU workload: one padded batch, or its continuous batching.

Runs as a process of its own (`python -m benchmarks.transformers_peer MODE COUNT RUNS DTYPE`), so
that no system measures with another's threads or memory; prints tokens per second of each run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.workload import MODEL, TOKENS, prompts
from replica.model.gguf_file import GGUFFile
from replica.model.loading import gguf_path


def load(dtype: str) -> Any:
    """The model as dense weights of that type: left packed, each product would unpack them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = gguf_path(MODEL)
    assert path is not None
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.quantization_config = None
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    weights = {name: values for name, values, _ in GGUFFile(str(path)).tensors()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    return model.eval()


def padded(model: Any, asked: list[list[int]]) -> Callable[[], int]:
    """`generate` on one left-padded batch; with one prompt this is serial decoding."""
    longest = max(map(len, asked))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in asked])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in asked])

    def run() -> int:
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=TOKENS,
                max_new_tokens=TOKENS,
                pad_token_id=0,
            )
        return int((output.shape[1] - longest) * len(asked))

    return run


def continuous(model: Any, asked: list[list[int]]) -> Callable[[], int]:
    """`generate_batch`, end-of-sequence switched off."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def run() -> int:
        results = model.generate_batch(asked, generation_config=config, progress_bar=False)
        return sum(len(result.generated_tokens) for result in results.values())

    return run


def main() -> None:
    mode, count, runs, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    run = {"padded": padded, "cb": continuous}[mode](load(dtype), prompts(count))
    run()
    for _ in range(runs):
        started = time.perf_counter()
        tokens = run()
        assert tokens == count * TOKENS, f"{tokens} tokens instead of {count * TOKENS}"
        print(f"tok_s {tokens / (time.perf_counter() - started):.3f}", flush=True)


if __name__ == "__main__":
    main()

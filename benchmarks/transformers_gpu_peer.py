"""Decode steps of transformers' continuous batching on a GPU: milliseconds, as `benchmarks.decode`.

Random weights in bfloat16, greedy, captured graphs and asynchronous batches. It calls flash-attn,
which is not needed here: stand-ins take its place, of which the paged one switches on the path
that transformers has for decode steps. Without it each step gathers all keys and values first.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers import modeling_flash_attention_utils as flash
from transformers.generation.continuous_batching.utils import WorkloadHints

from benchmarks.decode_cases import Case, cases, options
from benchmarks.flash_check import BLOCK_SIZE, check_decode, check_prompts
from benchmarks.random_model import configuration
from benchmarks.report import Report
from benchmarks.shapes import SHAPES
from benchmarks.triton_flash import flash_attn_varlen_func, flash_attn_with_kvcache
from replica.model.spec import ModelSpec

WARM_UPS = 8
"""Runs in which graphs may still be captured."""


def install() -> None:
    """Hand transformers the stand-ins as if flash-attn were there."""
    names = (None, flash_attn_varlen_func, flash_attn_with_kvcache, None, None)
    flash._lazy_imports = lambda *_, **__: names
    matrix = flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    matrix[2] = {**matrix[2], "general_availability_check": lambda: True}


def random_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Any:
    """Weights of the model's own initialisation."""
    config = configuration(spec, bos_token_id=None, eos_token_id=None)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="flash_attention_2"
        )
    return model.eval()


def batching(case: Case) -> Any:
    """Prompts wait while 15% of the blocks are not free, so half as many again as needed."""
    needed = case.rows * -(-(case.prompt + case.steps) // BLOCK_SIZE)
    blocks = needed * 3 // 2 + 4
    return transformers.ContinuousBatchingConfig(
        num_blocks=blocks,
        max_batch_tokens=min(8192, blocks * BLOCK_SIZE // 2),
        use_cuda_graph=True,
        use_async_batching=True,
    )


def graphs(manager: Any) -> int:
    """Graphs captured so far. Each of the two slots of asynchronous batching has its own."""
    pairs = manager.batch_processor.inputs_and_outputs.io_pairs
    return sum(len(pair.device_io.graphs._storage) for pair in pairs)


def run(manager: Any, case: Case, vocabulary: int, seed: int) -> float:
    """Milliseconds per step while all rows decode. Raises RuntimeError if a request fails."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(vocabulary) for _ in range(case.prompt)] for _ in range(case.rows)]
    manager.add_requests(inputs=prompts, max_new_tokens=case.steps, record_timestamps=True)
    times: list[list[float]] = []
    while len(times) < case.rows:
        result = manager.get_result(timeout=1)
        if result is not None and not result.error:
            assert len(result.generated_tokens) == case.steps
            times.append(result.timestamps)
        elif result is not None or not manager.is_running():
            raise RuntimeError(f"A request failed: {result and result.error}")
    began, ended = max(t[0] for t in times), min(t[-1] for t in times)
    inside = [t for t in times[0] if began <= t <= ended]
    return (inside[-1] - inside[0]) / (len(inside) - 1) * 1e3


def measure(model: Any, case: Case, runs: int) -> list[float]:
    """Milliseconds per step of each run. A run in which a graph was captured only warms up.

    Raises RuntimeError if decode steps would not take their own path, or if captures do not end.
    """
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    steps_ms: list[float] = []
    captured = 0
    with model.continuous_batching_context_manager(
        generation_config=greedy,
        continuous_batching_config=batching(case),
        workload_hints=WorkloadHints(case.prompt, case.steps, case.rows),
        warmup=False,
    ) as manager:
        if not manager.continuous_batching_config.max_blocks_per_request:
            raise RuntimeError("transformers would decode without a block table.")
        for seed in range(WARM_UPS + runs):
            step_ms = run(manager, case, model.config.vocab_size, seed)
            before, captured = captured, graphs(manager)
            print(f"    {step_ms:.3f} ms, {captured} graphs", flush=True)
            if captured == before:
                steps_ms.append(step_ms)
            if len(steps_ms) == runs:
                return steps_ms
    raise RuntimeError(f"Graphs are still being captured after {WARM_UPS + runs} runs.")


def main() -> None:
    chosen = options("transformers_gpu_peer", __doc__).parse_args()
    report, spec = Report("transformers_gpu_peer"), SHAPES[chosen.shape]
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    check_prompts(spec, like)
    check_decode(spec, like)
    install()
    model = random_model(spec, like.dtype, like.device)
    for case in cases(chosen):
        report.add(f"decode_ms.{case.name}", measure(model, case, chosen.runs))
    report.write(chosen.json)


if __name__ == "__main__":
    main()

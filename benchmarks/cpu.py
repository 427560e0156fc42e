"""Tokens per second on a CPU, side by side: our engine, our HTTP server, transformers.

The same model, prompts and dtype, 1 and 8 at once, 96 tokens each, in one run.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from tqdm import tqdm

from benchmarks.client import stream
from benchmarks.report import Report, parser
from benchmarks.server import Server, serving
from benchmarks.workload import MODEL, TOKENS, prompts
from replica.client import EngineClient
from replica.config import EngineConfig
from replica.messages import Sampling, Submit
from replica.process import available_cores

CONCURRENT = (1, 8)
THREADS = available_cores()
"""As many as transformers takes."""


def peer(mode: str, count: int, runs: int, dtype: str) -> list[float]:
    """A system of transformers, in its own process."""
    command = [sys.executable, "-m", "benchmarks.transformers_peer", mode]
    done = subprocess.run(
        [*command, str(count), str(runs), dtype], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"transformers, {mode}: {done.stderr[-2000:]}")
    lines = done.stdout.splitlines()
    return [float(line.split()[1]) for line in lines if line.startswith("tok_s")]


async def engine(runs: int, dtype: str) -> dict[int, list[float]]:
    """The engine process alone, by its messages."""
    options: dict[str, Any] = {"dtype": dtype, "threads": THREADS, "prefix_cache": False}
    client = await EngineClient.start(EngineConfig(model=MODEL, **options))
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    speeds: dict[int, list[float]] = {}
    for count in CONCURRENT:
        asked = prompts(count)
        speeds[count] = []
        for run in range(runs + 1):
            started = time.perf_counter()
            for number, prompt in enumerate(asked):
                name = f"{count}.{run}.{number}"
                client.send(Submit(request_id=name, prompt_ids=tuple(prompt), sampling=sampling))
            left = count
            async for report in client.events():
                left -= sum(output.finish_reason is not None for output in report.outputs)
                if not left:
                    break
            speeds[count].append(count * TOKENS / (time.perf_counter() - started))
    await client.close()
    return {count: values[1:] for count, values in speeds.items()}


async def http(server: Server, count: int, runs: int) -> list[float]:
    """Streams through the whole server, by the openai client. The first run is not counted."""
    client = AsyncOpenAI(base_url=server.base_url, api_key="demo-alice")

    asked = prompts(count)
    speeds = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(stream(client, server.model, prompt, TOKENS, temperature=0) for prompt in asked)
        )
        tokens = sum(answer.tokens for answer in answers)
        assert tokens == count * TOKENS, f"{tokens} tokens instead of {count * TOKENS}"
        speeds.append(tokens / (time.perf_counter() - started))
    return speeds[1:]


def main() -> None:
    options = parser("cpu", __doc__)
    options.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options.add_argument("--config", type=Path, default=Path("configs/local.yaml"))
    chosen = options.parse_args()
    runs, dtype = chosen.runs, chosen.dtype
    report = Report("cpu")
    with tqdm(total=7, desc="systems", leave=False) as progress:
        for count, speeds in asyncio.run(engine(runs, dtype)).items():
            report.add(f"tok_s.{count}.engine", speeds)
        progress.update()
        with serving(chosen.config, dtype=dtype, threads=THREADS, prefix_cache=False) as server:
            report.figures["ready_s"] = server.ready_s
            for count in CONCURRENT:
                report.add(f"tok_s.{count}.http", asyncio.run(http(server, count, runs)))
        progress.update()
        with serving(
            chosen.config, dtype=dtype, threads=THREADS, prefix_cache=False, overlap=False
        ) as server:
            report.add("tok_s.8.http_no_overlap", asyncio.run(http(server, 8, runs)))
        progress.update()
        for name, mode in (("transformers_padded", "padded"), ("transformers_cb", "cb")):
            for count in CONCURRENT:
                report.add(f"tok_s.{count}.{name}", peer(mode, count, runs, dtype))
                progress.update()
    report.write(chosen.json)


if __name__ == "__main__":
    main()

"""What overlap of CPU and GPU brings: steps with it and without it, in one run, on one GPU.

All rows decode together, greedily, over random weights. Bubbles by the engine's own meter (idle
between and inside steps, by CUDA events); beside them the share of time without any kernel, by
torch's profiler, which slows steps. `--tokens` adds one run of that many tokens per row.
"""

from __future__ import annotations

import torch

from benchmarks.bench_engine import MODES, BenchEngine, Window, engines
from benchmarks.report import Report, parser
from benchmarks.shapes import SHAPES, random_decoder
from replica.device.cuda import CudaDevice
from replica.device.gpu_trace import record
from replica.model.decoder import Decoder
from replica.timeline.profile import Profile

PROFILED = 50


def slot_memory_share(engine: BenchEngine) -> float:
    """What the second slot's graphs take, of what the first slot's took."""
    taken = [0, 0]
    for graph in engine.graphs.reports():
        taken[graph.key.slot] += graph.recording.memory_bytes
    return taken[1] / max(1, taken[0])


def print_graphs(engine: BenchEngine) -> None:
    print(
        f"{'graph':<36}{'capture':>9}{'inst.':>9}{'eager':>9}{'replay':>9}{'MiB':>8}{'paid':>8}{'replays':>9}{'padding':>9}"
    )
    for graph in engine.graphs.reports():
        key, cost = graph.key, graph.recording
        name = f"{key.phase} {key.kind or ''} {key.size} slot {key.slot}"
        print(
            f"{name:<36}{cost.capture_ms:>9.2f}{cost.instantiate_ms:>9.2f}{cost.eager_ms:>9.3f}"
            f"{cost.replay_ms:>9.3f}{cost.memory_bytes / 2**20:>8.1f}{graph.paid_after:>8.0f}"
            f"{graph.replays:>9}{graph.padding_share:>9.3f}"
        )


def traced(engine: BenchEngine, device: CudaDevice, prompt: int) -> Profile:
    """Steps in the middle of decoding."""
    before = engine.engine.scheduler.counts["prompt_tokens"]
    total = engine.submit(prompt, 4 * PROFILED, seed=1)
    engine.engine.advance()
    engine.prefill(before + total)
    for _ in range(PROFILED):
        engine.engine.advance()
    trace = record(device, engine.engine.advance, PROFILED)
    for violation in trace.violations():
        print("stream hygiene:", violation)
    while engine.engine.busy:
        engine.engine.advance()
    return trace


def compare(report: Report, decoder: Decoder, device: CudaDevice, shape: str, rows: int,
            prompt: int, tokens: int, runs: int) -> bool:  # fmt: skip
    """Overlap on and off, alternating. Returns whether all runs brought the same tokens."""
    found: dict[str, list[Window]] = {mode: [] for mode in MODES}
    with engines(decoder, device, rows, prompt + tokens, list(MODES)) as by_mode:
        for _ in range(runs):
            for mode, engine in by_mode.items():
                found[mode].append(engine.run(prompt, tokens))
        print_graphs(by_mode["on"])
        report.figures["slot_memory_share"] = slot_memory_share(by_mode["on"])
        for graph in by_mode["on"].graphs.reports():
            if graph.key.phase == "forward" and not graph.key.slot:
                report.add(f"graph_ms.instantiate.{shape}", [graph.recording.instantiate_ms])
    for mode, windows in found.items():
        report.add(f"wall_s.{mode}.{shape}", [w.wall_s for w in windows])
        report.add(f"step_ms.{mode}.{shape}", [w.step_ms for w in windows])
        report.add(f"cpu_share.{mode}.{shape}", [w.cpu_share for w in windows])
        report.add(f"bubble_share.{mode}.{shape}", [w.bubble_share for w in windows])
        report.add(f"host_ms.{rows}.{mode}.{shape}", [w.host_ms for w in windows])
    first = found["on"][0].tokens
    return all(w.tokens == first for windows in found.values() for w in windows)


def add_kernel_idle(report: Report, device: CudaDevice, shape: str, rows: int, prompt: int) -> None:
    """Last: once the profiler has run in a process, each call of CUDA takes longer."""
    decoder = random_decoder(SHAPES[shape], torch.bfloat16, device.memory)
    with engines(decoder, device, rows, prompt + 4 * PROFILED, list(MODES)) as by_mode:
        for mode, engine in by_mode.items():
            idle = traced(engine, device, prompt).idle_share
            report.add(f"kernel_idle_share.{mode}.{shape}", [idle])


@torch.inference_mode()
def main() -> None:
    options = parser("overlap", __doc__)
    options.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--context", type=int, default=4096, help="mean context of the window")
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--tokens", type=int, help="also one run of this many tokens per row")
    chosen = options.parse_args()
    report, device = Report("overlap"), CudaDevice()
    prompt = chosen.context - chosen.steps // 2
    equal = True
    for shape in chosen.shape:
        decoder = random_decoder(SHAPES[shape], torch.bfloat16, device.memory)
        equal &= compare(
            report, decoder, device, shape, chosen.batch, prompt, chosen.steps, chosen.runs
        )
        for rows in (32, 256):
            with engines(decoder, device, rows, 512, ["on"]) as by_mode:
                windows = [by_mode["on"].run(256, 200) for _ in range(chosen.runs)]
            report.add(f"host_ms.{rows}", [window.host_ms for window in windows])
        if chosen.tokens and shape == chosen.shape[-1]:
            with engines(decoder, device, chosen.batch, 64 + chosen.tokens, ["on"]) as by_mode:
                report.add("headline_s", [by_mode["on"].run(64, chosen.tokens).wall_s])
        del decoder
    for shape in chosen.shape:
        add_kernel_idle(report, device, shape, chosen.batch, prompt)
    report.figures["tokens_equal"] = float(equal)
    print("tokens equal:", equal)
    report.write(chosen.json)


if __name__ == "__main__":
    main()

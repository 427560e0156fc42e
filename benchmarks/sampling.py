"""What sampling costs of a decode step, by what is asked of it, at one batch size.

All of a step's sampling runs in a graph over bell-shaped logits, which are harder to filter
than peaked ones. "everything": temperature, top-k, top-p, min-p, penalties, biases, held
stop tokens and log probabilities, in every row. Shares are of a decode step's time, measured by
`benchmarks.decode` and given as an option.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.report import Report, parser
from replica.device.cuda import CudaDevice, CudaRecorder
from replica.io_slot import (
    FIRST_STOP_ID,
    HOLD_UNTIL,
    MIN_P,
    NUM_BIASES,
    PRESENCE,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from replica.messages import MAX_BIASES, MAX_LOGPROBS
from replica.sampling.backends import make_sampler
from replica.sampling.logprobs import write_logprobs
from replica.sampling.sampler import Sampler
from replica.scheduling.batch import Batch

ALL: dict[int, float] = {TEMPERATURE: 0.8, TOP_P: 0.95, MIN_P: 0.01}
PENALTIES = torch.tensor([0.5, 0.2, 1.1])
KINDS: dict[str, tuple[dict[int, float], int]] = {
    "greedy": ({TEMPERATURE: 0.0}, 0),
    "temperature": ({TEMPERATURE: 0.8}, 0),
    "top_k": ({TEMPERATURE: 0.8}, 50),
    "top_p": ({TEMPERATURE: 0.8, TOP_P: 0.95}, 0),
    "min_p": ({TEMPERATURE: 0.8, MIN_P: 0.05}, 0),
    "all_filters": (ALL, 500),
}
"""Floats by column, and top-k."""


def prepared(rows: int, vocab_size: int, device: CudaDevice, kind: str) -> Sampler:
    sampler = make_sampler(rows, vocab_size, device.memory)
    floats, top_k = KINDS[kind]
    for column, value in floats.items():
        sampler.floats[:, column] = value
    sampler.ints[:, TOP_K] = top_k
    sampler.ints[:, SEED] = torch.arange(rows + 1, device=device.memory)
    sampler.ints[:, FIRST_STOP_ID:] = -1
    return sampler


def shape_all(sampler: Sampler) -> None:
    """Penalties, the most biases there can be, and a stop token held back, in every row."""
    sampler.floats[:, PRESENCE:] = PENALTIES.to(sampler.floats.device)
    sampler.ints[:, NUM_BIASES] = MAX_BIASES
    sampler.ints[:, HOLD_UNTIL] = 10_000
    sampler.ints[:, FIRST_STOP_ID] = 2
    shaping = sampler.shaping
    shaping.bias_ids[:] = torch.arange(MAX_BIASES, device=shaping.bias_ids.device) * 100
    shaping.counts[:, ::50] = 1


def timed_ms(device: CudaDevice, work: Callable[[], None], runs: int) -> list[float]:
    """Of twenty replays at a time, per replay."""
    found: list[float] = []

    def measure() -> None:
        recorder = CudaRecorder(device)
        recording = recorder(work)

        def replays() -> None:
            for _ in range(20):
                recording.replay()

        found.extend(recorder.timed_ms(replays) / 20 for _ in range(runs))

    device.stream("compute").run(measure)
    return found


@torch.inference_mode()
def main() -> None:
    options = parser("sampling", __doc__)
    options.add_argument("--batch", type=int, default=256)
    options.add_argument("--vocabulary", type=int, default=128_256)
    options.add_argument("--step-ms", type=float, default=14.5, help="of a decode step")
    chosen = options.parse_args()
    report, device, rows = Report("sampling"), CudaDevice(), chosen.batch
    logits = torch.randn(rows, chosen.vocabulary, device=device.memory) * 3
    places = torch.arange(rows, device=device.memory)
    inputs = {"sample_rows": places, "sample_positions": places}
    sampled = torch.zeros(rows, dtype=torch.int64, device=device.memory)

    def sampling(sampler: Sampler, batch: Batch) -> Callable[[], None]:
        def work() -> None:
            sampled.copy_(sampler.sample(batch, inputs, logits, None))

        return work

    for kind in KINDS:
        sampler = prepared(rows, chosen.vocabulary, device, kind)
        work = sampling(sampler, Batch.padding(rows))
        report.add(f"ms.{kind}.{rows}", timed_ms(device, work, chosen.runs))
    sampler = prepared(rows, chosen.vocabulary, device, "all_filters")
    shape_all(sampler)
    shaped = sampling(sampler, Batch.padding(rows, shaped=True))
    report.add(f"ms.all_filters_shaped.{rows}", timed_ms(device, shaped, chosen.runs))
    chosen_logprobs = torch.empty(rows, device=device.memory)
    ids = torch.empty(rows, MAX_LOGPROBS, dtype=torch.int32, device=device.memory)
    top = torch.empty(rows, MAX_LOGPROBS, device=device.memory)

    def logprobs() -> None:
        write_logprobs(logits, sampled, chosen_logprobs, ids, top)

    def everything() -> None:
        shaped()
        logprobs()

    report.add(f"ms.logprobs.{rows}", timed_ms(device, logprobs, chosen.runs))
    whole = report.add(f"ms.everything.{rows}", timed_ms(device, everything, chosen.runs))
    report.add(f"cost_share.{rows}", [whole / chosen.step_ms])
    report.write(chosen.json)


if __name__ == "__main__":
    main()

"""Random schedules under race mode, and proof that race mode would notice.

The long form: `pytest tests/replica/test_races.py --schedules 1000`.
"""

from __future__ import annotations

import random

import pytest

from replica.device.stream import StreamFailure
from replica.messages import Abort
from tests.models import save_tiny
from tests.oracle import Oracle, decoder_runner
from tests.races import lose_event, race_bench, release_early, write_state_from_h2d
from tests.script import Bench, submit

BLOCK, BLOCKS, CONTEXT, COUNT = 4, 64, 96, 16


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle(save_tiny(tmp_path_factory.mktemp("tiny"), seed=3), COUNT)


@pytest.fixture(scope="module")
def runner(oracle):
    return decoder_runner(oracle.folder, BLOCKS, BLOCK)


def asked(count: int = 24) -> list[tuple[int, ...]]:
    """A fixed set of prompts with shared prefixes: the oracle answers each once."""
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(40)]
    return [
        tuple(
            shared[: rng.choice([0, 8, 21, 40])]
            + [rng.randrange(256) for _ in range(rng.choice([1, 2, 5, 9, 30]))]
        )
        for _ in range(count)
    ]


def schedule(engine: Bench, oracle: Oracle, seed: int) -> None:
    """Arrivals, chunks, decodes, ends, cancels, failures, preemptions, prefix hits, evictions."""
    rng = random.Random(seed)
    prompts = [rng.choice(asked()) for _ in range(rng.randint(4, 14))]
    limits = [rng.randint(1, COUNT) for _ in prompts]
    for number, prompt in enumerate(prompts):
        fails = str(rng.randint(0, COUNT)) if rng.random() < 0.2 else ""
        engine.send(
            submit(
                str(number),
                prompt,
                max_tokens=limits[number],
                band=rng.randrange(2),
                grammar=fails,
            )
        )
        if rng.random() < 0.25:
            engine.send(Abort(request_id=str(rng.randrange(number + 1))))
        engine.step(rng.randrange(5))
    outputs = engine.run()
    endings = engine.endings()
    for number, prompt in enumerate(prompts):
        got, expected = outputs[str(number)], oracle.greedy(prompt, limits[number])
        if endings[str(number)] in ("abort", "error"):
            assert got == expected[: len(got)]
        else:
            assert got == expected


def race(runner, oracle, seed, plant=None) -> None:
    rng = random.Random(seed)
    engine = race_bench(
        runner,
        seed,
        CONTEXT,
        overlap=rng.random() < 0.8,
        max_rows=rng.randint(1, 6),
        max_step_tokens=rng.choice([6, 16, 64]),
        block_size=BLOCK,
        kv_tokens=rng.choice([CONTEXT, CONTEXT + 24, BLOCKS * BLOCK]),
        prefix_cache=rng.random() < 0.7,
    )
    try:
        if plant is not None:
            plant(engine)
        schedule(engine, oracle, seed)
    finally:
        engine.close()


def test_random_schedules_under_race_mode_equal_the_reference(runner, oracle, pytestconfig):
    for seed in range(pytestconfig.getoption("schedules")):
        try:
            race(runner, oracle, seed)
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error


@pytest.mark.parametrize(
    "plant",
    [
        lose_event("h2d_done"),
        lose_event("compute_done"),
        lose_event("d2h_done"),
        release_early,
        write_state_from_h2d,
    ],
    ids=["h2d_done", "compute_done", "d2h_done", "release_early", "state_from_h2d"],
)
def test_a_lost_safeguard_is_noticed(runner, oracle, plant):
    """Within 20 schedules; each of the intact ones above passes. C05 is the last plant."""
    for seed in range(20):
        try:
            race(runner, oracle, seed, plant)
        except (AssertionError, StreamFailure, LookupError):
            return
    pytest.fail("the plant went unnoticed")

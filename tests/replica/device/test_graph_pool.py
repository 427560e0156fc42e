"""Which steps are replayed, in which size, and what padding must not do."""

from __future__ import annotations

import random

import pytest

from replica.device.graph_pool import CaptureFailed, GraphKey, GraphPool
from replica.device.stream import StreamFailure
from replica.messages import Abort
from tests.graphs import Closure, TokenRunner, record
from tests.script import Bench, submit


def bench(sizes: tuple[int, ...] = (1, 2, 4, 8, 12), **options) -> tuple[Bench, GraphPool]:
    pool = GraphPool(record, sizes, lambda: 2**30)
    options = {"max_rows": 12, "kv_tokens": 2048, "eos_token_ids": (), **options}
    engine = Bench(TokenRunner(), graphs=pool, **options)
    engine.engine.pipeline.capture()
    return engine, pool


def prompts(count: int, seed: int = 0) -> dict[str, tuple[int, ...]]:
    rng = random.Random(seed)
    return {
        str(i): tuple(rng.randrange(64) for _ in range(rng.choice([1, 2, 9]))) for i in range(count)
    }


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8, 12), (12,), (3, 12), (1, 2, 4)], ids=str)
def test_batches_on_and_off_captured_sizes_are_exact(sizes, overlap):
    """C43: batches grow to 12 and shrink one by one; also where nothing was captured for them."""
    engine, pool = bench(sizes, overlap=overlap)
    asked = prompts(12)
    limits = {name: 3 + 2 * i for i, name in enumerate(asked)}
    outputs = engine.run(*(submit(n, p, max_tokens=limits[n]) for n, p in asked.items()))
    runner = TokenRunner()
    assert outputs == {n: runner.expected(p, limits[n]) for n, p in asked.items()}
    uncovered = sum(count for rows, count in pool.seen.items() if rows > sizes[-1])
    assert uncovered == 0
    assert (pool.eager["sampling"] > 0) == (sizes[-1] < 12), "what was not captured is counted"
    engine.close()


def test_nothing_is_recorded_under_traffic():
    engine, pool = bench()
    before = [report.recording for report in pool.reports()]
    engine.run(*(submit(n, p, max_tokens=9) for n, p in prompts(12).items()))
    assert [report.recording for report in pool.reports()] == before
    engine.close()


def test_decode_steps_are_replayed_and_the_model_is_not_called():
    """Every forward that happens is a prompt's, or was recorded: here recordings call it too."""
    engine, pool = bench()
    engine.run(submit("a", (1, 2, 3), max_tokens=20))
    forwards = {r.key: r.replays for r in pool.reports() if r.key.phase == "forward" and r.replays}
    assert forwards == {GraphKey("forward", 0, 1): 9, GraphKey("forward", 1, 1): 10}
    assert pool.eager["irregular"] == 1, "the prompt"
    engine.close()


def test_padding_is_counted_per_graph():
    engine, pool = bench((12,))
    engine.run(*(submit(n, (1,), max_tokens=5) for n in "abc"))
    shares = {r.padding_share for r in pool.reports() if r.replays}
    assert shares == {0.75}
    engine.close()


@pytest.mark.parametrize("seed", range(8))
def test_random_arrivals_cancels_and_kinds_of_sampling(seed):
    """Rows greedy, filtered, held and constrained, in one batch, padded."""
    rng = random.Random(seed)
    engine, _ = bench((2, 5, 12), overlap=bool(seed % 2), kv_tokens=rng.choice([64, 2048]))
    asked = prompts(30, seed)
    kinds = [
        {},
        {"temperature": 0.1, "top_k": 1},
        {"temperature": 0.01},
        {"temperature": 0.01, "top_p": 0.5},
        {"min_tokens": 3, "stop_token_ids": ()},
        {"allowed_token_ids": tuple(range(64))},
    ]
    for name, prompt in asked.items():
        engine.send(submit(name, prompt, max_tokens=10, **rng.choice(kinds)))
        if rng.random() < 0.2:
            engine.send(Abort(request_id=str(rng.randrange(int(name) + 1))))
        engine.step(rng.randrange(3))
    outputs = engine.run()
    runner = TokenRunner()
    for name, prompt in asked.items():
        expected = runner.expected(prompt, 10)
        got = outputs[name]
        assert got == expected[: len(got)]
        assert len(got) == 10 or engine.endings()[name] == "abort"
    engine.close()


def test_a_failed_capture_stops_the_start_and_names_size_and_memory():
    def fail(work) -> Closure:
        raise RuntimeError("out of memory")

    pool = GraphPool(fail, (4,), lambda: 3 * 2**30)
    engine = Bench(TokenRunner(), graphs=pool)
    with pytest.raises(StreamFailure) as failure:
        engine.engine.pipeline.capture()
    assert isinstance(failure.value.__cause__, CaptureFailed)
    assert "batch size 4" in str(failure.value)
    assert "3.00 GiB" in str(failure.value)
    engine.close()


def test_a_graph_tells_after_how_many_replays_it_has_paid():
    _, pool = bench((4,))
    assert {report.paid_after for report in pool.reports()} == {1.0}  # 2 ms for 2 ms a replay


def test_a_run_tells_which_sizes_would_suit_it():
    engine, pool = bench((12,))
    assert pool.fit_report() == ""
    engine.run(submit("a", (1, 2), max_tokens=9))
    assert "0.0% with graph_sizes: [1, 12]" in engine.engine.pipeline.fit_report()
    engine.close()

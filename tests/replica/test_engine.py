"""The engine over a scripted model: exact interleavings of launch, copy, apply and cancel."""

from __future__ import annotations

import inspect

import pytest
import torch

from replica.engine import Engine
from replica.messages import Abort, Stop
from replica.scheduling.step_budget import CostModel
from tests.script import EOS, VOCAB, Bench, ScriptRunner, counting, submit

BOTH = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])


def test_a_step_reads_top_to_bottom_in_one_short_method():
    for step in (Engine.step, Engine.step_synchronously):
        assert len(inspect.getsource(step).splitlines()) <= 14


@BOTH
def test_each_request_gets_its_own_tokens_whoever_shares_its_batch(bench, overlap):
    engine = bench(overlap=overlap, max_step_tokens=7)
    sizes = [1, 3, 9, 30, 20, 7, 2]
    requests = [submit(f"r{i}", range(3, 3 + n), max_tokens=i + 1) for i, n in enumerate(sizes)]
    outputs = engine.run(*requests)
    for i, n in enumerate(sizes):
        assert outputs[f"r{i}"] == [counting("", n + j) for j in range(i + 1)]
    assert set(engine.endings().values()) == {"length"}


def test_the_next_step_is_launched_before_the_last_one_is_read(bench):
    runner = ScriptRunner(gated=True)
    engine = bench(runner)
    engine.send(submit("a"))
    engine.step()
    assert engine.engine.pipeline.in_flight.step == 0
    assert engine.outputs() == {}
    runner.gate.release()
    engine.step()  # launches step 1, then reads step 0
    assert engine.engine.pipeline.in_flight.step == 1
    assert engine.outputs() == {"a": [counting("a", 3)]}
    runner.gate.release(10)


@BOTH
def test_what_the_model_is_fed_is_what_was_sampled(bench, overlap):
    """R01, R07: the carried token reaches the model, never a placeholder."""
    runner = ScriptRunner()
    engine = bench(runner, overlap=overlap)
    outputs = engine.run(submit("a", [5, 6, 7], max_tokens=9), submit("b", [8], max_tokens=5))
    for name, prompt in (("a", [5, 6, 7]), ("b", [8])):
        sequence = prompt + outputs[name]
        assert [runner.fed[name][i] for i in range(len(sequence) - 1)] == sequence[:-1]


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_a_request_that_loses_its_turn_right_after_a_launch_goes_on_unharmed(bench, rounds):
    """R01: its token in flight settles meanwhile and is fed from the CPU."""
    runner = ScriptRunner()
    engine = bench(runner)
    engine.send(submit("a", max_tokens=8), submit("b", max_tokens=12))
    engine.step(2)
    row = next(s.row for s in engine.engine.rows.sequences if s and s.request_id == "a")
    engine.engine.rows.live[row] = False
    engine.step(rounds)
    engine.engine.rows.live[row] = True
    outputs = engine.run()
    assert outputs["a"] == [counting("a", 3 + i) for i in range(8)]
    assert runner.fed["a"] == dict(enumerate([5, 6, 7, *outputs["a"][:-1]]))


@BOTH
def test_a_cancel_while_the_last_step_runs_is_a_cancel(bench, overlap):
    """C02: one terminal state, 'abort', and nothing leaks."""
    runner = ScriptRunner(gated=True)
    engine = bench(runner, overlap=overlap)
    engine.send(submit("a", max_tokens=1))
    if overlap:
        engine.step()
    engine.send(Abort(request_id="a"))
    runner.gate.release()
    engine.run()
    assert engine.endings() == {"a": "abort"}
    assert dict(engine.engine.scheduler.finished) == {"abort": 1}


def test_a_cancel_between_the_copy_of_a_result_and_its_use_is_a_cancel(bench):
    """C02, the second window: step 0 is copied out, its end is not applied yet."""
    engine = bench()
    engine.send(submit("a", max_tokens=1))
    engine.step()
    engine.engine.pipeline._lanes[0].d2h_done.synchronize()
    engine.send(Abort(request_id="a"))
    assert engine.run() == {"a": []}
    assert engine.endings() == {"a": "abort"}


@BOTH
@pytest.mark.parametrize("when", range(6))
def test_a_cancel_in_any_phase_frees_everything_and_hurts_nobody(bench, overlap, when):
    engine = bench(overlap=overlap, max_step_tokens=4)
    engine.send(submit("a", range(3, 12), max_tokens=6), submit("b", max_tokens=6))
    engine.step(when)
    engine.send(Abort(request_id="a"))
    outputs = engine.run()
    assert outputs["b"] == [counting("b", 3 + i) for i in range(6)]
    assert engine.endings() == {"a": "abort", "b": "length"}


def test_messages_that_come_twice_or_in_the_wrong_order_do_no_harm(bench):
    engine = bench()
    engine.send(Abort(request_id="early"), submit("early"), submit("a"), submit("a"))
    engine.step()
    engine.send(submit("a"), Abort(request_id="nobody"))
    engine.run()
    engine.send(submit("a"), Abort(request_id="a"))  # long over
    outputs = engine.run()
    assert outputs.keys() == {"a"}
    assert engine.endings() == {"a": "length"}
    engine.channel.reports.clear()
    engine.run(submit("a", attempt=1))  # a new attempt is new
    assert engine.engine.scheduler.finished["length"] == 2


@BOTH
def test_blocks_and_rows_change_hands_safely(bench, overlap):
    """C04: a pool for two; ends come unforeseen while the next step is in flight."""

    def script(name: str, position: int) -> int:
        return EOS if position % 7 == int(name[1:]) % 5 + 3 else counting(name, position)

    runner = ScriptRunner(script)
    engine = bench(runner, overlap=overlap, max_rows=2, kv_tokens=64, prefix_cache=False)
    prompts = {f"r{i}": range(3, 4 + i % 3) for i in range(40)}
    outputs = engine.run(*(submit(name, prompts[name], max_tokens=9) for name in prompts))
    for name, prompt in prompts.items():
        tokens = [script(name, position) for position in range(len(prompt), len(prompt) + 9)]
        length = tokens.index(EOS) + 1 if EOS in tokens else 9
        assert outputs[name] == tokens[:length]
    ended = [batch.rows.tolist() for batch in runner.batches]  # in the order of execution
    assert all(len(set(rows)) == len(rows) for rows in ended)


@BOTH
@pytest.mark.parametrize(
    ("options", "length", "reason"),
    [
        ({"min_tokens": 5, "max_tokens": 8}, 6, "stop"),
        ({"ignore_eos": True, "max_tokens": 8}, 8, "length"),
        ({"min_tokens": 8, "max_tokens": 8}, 8, "length"),
        ({"stop_token_ids": (20,), "min_tokens": 2, "max_tokens": 8}, 3, "stop"),
    ],
)
def test_min_tokens_holds_back_every_stop_token(bench, overlap, options, length, reason):
    """C07: the model always prefers its second end id; tokens in flight count."""
    logits = torch.zeros(VOCAB)
    logits[[4, 20, 9]] = torch.tensor([9.0, 8.0, 7.0])
    runner = ScriptRunner(lambda name, position: logits)
    engine = bench(runner, overlap=overlap, eos_token_ids=(EOS, 4))
    outputs = engine.run(submit("a", **options))
    assert len(outputs["a"]) == length
    assert engine.endings() == {"a": reason}


@BOTH
def test_a_stop_token_is_reported_as_the_last_id(bench, overlap):
    runner = ScriptRunner(lambda name, position: EOS if position == 5 else 30)
    engine = bench(runner, overlap=overlap)
    assert engine.run(submit("a", max_tokens=9)) == {"a": [30, 30, EOS]}
    assert engine.endings() == {"a": "stop"}


@BOTH
@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": [VOCAB]},
        {"prompt": [-1]},
        {"prompt": []},
        {"prompt": [5] * 64},
        {"stop_token_ids": (2**31,)},
        {"stop_token_ids": (2**63 - 1,)},
        {"allowed_token_ids": (VOCAB,)},
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (EOS,), "min_tokens": 1},
        {"max_tokens": 0},
    ],
)
def test_a_request_that_cannot_run_is_refused_alone(bench, overlap, bad):
    """C22 at the engine: the neighbour does not notice."""
    engine = bench(overlap=overlap)
    outputs = engine.run(submit("bad", **bad), submit("good"))
    assert engine.endings() == {"bad": "error", "good": "length"}
    assert outputs["good"] == [counting("", 3 + i) for i in range(4)]
    assert next(output.error for output in engine.reported if output.request_id == "bad")


@BOTH
def test_preemption_repeats_no_token_and_loses_none(bench, overlap):
    """C41: usage and stream equal the run with a large pool."""
    requests = [submit(f"r{i}", range(3, 9), max_tokens=40, seed=i) for i in range(4)]
    engine = bench(overlap=overlap, kv_tokens=64)
    outputs = engine.run(*requests)
    assert engine.engine.stats().preemptions > 0
    assert all(outputs[f"r{i}"] == [counting("", 6 + j) for j in range(40)] for i in range(4))


@BOTH
def test_seeded_draws_do_not_depend_on_company(bench, overlap):
    """C08: alone, with mates, after a preemption, from the prefix cache, over a split answer."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    logits[EOS] = -100.0
    seeded = {"seed": 42, "temperature": 0.8, "max_tokens": 16}
    mates = [submit(f"m{i}", range(3, 8), seed=i, temperature=1.0) for i in range(9)]

    def run(*others, again=False, **options):
        engine = bench(ScriptRunner(lambda n, p: logits), overlap=overlap, **options)
        if again:
            engine.run(submit("before", **seeded))
        outputs = engine.run(*others, submit("x", **seeded))
        return outputs["x"], engine.engine.stats()

    alone, _ = run()
    assert run(*mates)[0] == alone
    assert run(again=True)[0] == alone
    big = [submit(f"m{i}", range(3, 8), max_tokens=40, seed=i) for i in range(3)]
    crowded, stats = run(*big, kv_tokens=64)
    assert (crowded, stats.preemptions > 0) == (alone, True)
    engine = bench(ScriptRunner(lambda n, p: logits), overlap=overlap)
    rest = engine.run(submit("x", prior_output_ids=tuple(alone[:6]), **seeded))
    assert rest["x"] == alone[6:]
    assert engine.reported[0].offset == 6


@BOTH
def test_cancelling_a_full_queue_frees_what_prefixes_had_pinned(bench, overlap):
    """R26: rows, blocks and the cache are as before, and serve the next one."""
    engine = bench(overlap=overlap, max_rows=2, kv_tokens=64, prefix_cache=True)
    shared = range(3, 15)
    engine.run(submit("warm", shared, max_tokens=1))
    names = [f"r{i}" for i in range(30)]
    for count, name in enumerate(names):
        engine.send(submit(name, [*shared, 20 + count % 3], max_tokens=40))
        engine.step(count % 3)
    engine.send(*(Abort(request_id=name) for name in names))
    engine.run()
    assert set(engine.endings().values()) == {"length", "abort"}
    engine.check_released()
    engine.run(submit("next", shared, max_tokens=2))
    assert engine.endings()["next"] == "length"
    assert [o.cached_tokens for o in engine.reported if o.request_id == "next"][-1] == 8


@BOTH
def test_allowed_token_ids_limit_the_answer(bench, overlap):
    engine = bench(overlap=overlap)
    outputs = engine.run(
        submit("a", allowed_token_ids=(40, 41), temperature=1.0, max_tokens=30), submit("b")
    )
    assert set(outputs["a"]) <= {40, 41}
    assert outputs["b"] == [counting("", 3 + i) for i in range(4)]


def test_two_domains_never_share_a_prefix(bench):
    """C38: the owner hits, the other does the work of a cold prompt."""
    engine = bench(prefix_cache=True)
    prompt = range(3, 18)

    def cached(name: str, salt: str) -> tuple[int, int]:
        before = engine.engine.stats().prompt_tokens
        engine.run(submit(name, prompt, cache_salt=salt))
        found = [o.cached_tokens for o in engine.reported if o.request_id == name][-1]
        return found, engine.engine.stats().prompt_tokens - before

    assert cached("a1", "A") == (0, 15)
    assert cached("a2", "A") == (12, 3)
    assert cached("b1", "B") == (0, 15)
    assert cached("b2", "") == (0, 15)


def test_a_drain_finishes_what_runs_and_refuses_what_comes(bench):
    engine = bench()
    engine.send(submit("a", max_tokens=6))
    engine.step(2)
    engine.send(Stop(), submit("late"))
    engine.engine.run()
    assert engine.endings() == {"a": "length", "late": "error"}


def test_a_stop_without_drain_ends_everything_at_once(bench):
    engine = bench()
    engine.send(*(submit(f"r{i}", max_tokens=50) for i in range(6)))
    engine.step(3)
    engine.send(Stop(drain=False))
    engine.engine.run()
    assert set(engine.endings().values()) == {"abort"}
    engine.check_released()


def test_a_context_that_the_pool_cannot_hold_is_refused_at_start(bench):
    with pytest.raises(ValueError, match="KV pool holds only 64"):
        bench(kv_tokens=64, max_model_len=65)


def test_a_long_prompt_holds_no_step_up_by_default():
    """A step that takes long enough looks like an engine that hangs."""
    engine = Bench(ScriptRunner(), max_model_len=400, kv_tokens=512)
    engine.engine.scheduler.cost = CostModel(token_ms=10.0)
    engine.send(submit("long", [5] * 300, max_tokens=2))
    sizes = []
    while engine.channel.commands or engine.engine.busy:
        engine.step()
        if (batch := engine.engine.pipeline.in_flight) is not None:
            sizes.append(batch.num_tokens)
    assert max(sizes) == 25
    engine.close()


@BOTH
def test_what_is_complete_when_it_comes_ends_once_however_often_it_comes(bench, overlap):
    engine = bench(overlap=overlap)
    whole = submit("whole", max_tokens=2, prior_output_ids=(9, 9))
    engine.run(whole, whole, submit("other"), whole)
    assert engine.endings() == {"whole": "length", "other": "length"}
    engine.run(whole)
    assert len([output for output in engine.reported if output.request_id == "whole"]) == 1

"""The torture of an engine in its short form, and that each of its checks can fail."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from benchmarks import torture, torture_engine
from benchmarks.torture_checks import Checks, Record
from benchmarks.torture_engine import Driven, on_compile, setting, start
from benchmarks.torture_phases import PHASES
from benchmarks.torture_start import corrupt, empty, stale, starts, try_start
from replica.messages import Output, Sampling, Submit, TokenLogprobs
from replica.model.runner import DecoderRunner
from replica.scheduling.batch import Batch
from replica.scheduling.block_manager import BlockManager

SHORT = ["--shape", "small", "--device", "cpu", "--minutes", "0.03"]
STOP = 9


def short(*phases: str) -> list[str]:
    return [*SHORT, "--phases", *(phases or PHASES)]


def test_the_short_form_finds_nothing_wrong(tmp_path, capsys) -> None:
    assert torture.main([*short(), "--json", str(tmp_path / "torture.json")]) == 0
    figures = json.loads((tmp_path / "torture.json").read_text())["figures"]
    assert (figures["failures"], figures["compiled_after_start"]) == (0, 0)
    for name in ("minutes", "requests", "tokens", "preemptions", "longest_gap_ms"):
        assert figures[name] > 0, name
    assert figures["cost_model_steps"] > 20
    assert figures["longest_gap_over_budget"] == pytest.approx(
        figures["longest_gap_ms"] / 20, rel=1e-3
    )


def test_phases_can_be_left_out(monkeypatch) -> None:
    monkeypatch.setattr(torture, "starts", lambda shape, device, folder, record: folder)
    assert torture.main([*SHORT, "--phases", "starts"]) == 0


# Starts


def test_an_engine_starts_with_a_folder_of_caches_in_any_state(tmp_path) -> None:
    record = Record(0)
    caches = starts("small", "cpu", tmp_path, record)
    assert record.failures == []
    assert any(caches.iterdir())


def test_starts_that_fail_are_told_and_spoil_nothing_else(monkeypatch, tmp_path) -> None:
    tried: list[Path] = []
    problems = iter(["", "no field 'old_width'", ""])

    def fail(shape: str, device: str, folder: Path) -> str:
        tried.append(folder)
        return next(problems)

    monkeypatch.setattr("benchmarks.torture_start.try_start", fail)
    record = Record(0)
    assert starts("small", "cpu", tmp_path, record) not in tried
    (failure,) = record.failures
    assert "that is stale: no field 'old_width'" in failure


def test_a_start_that_fails_says_why(tmp_path) -> None:
    assert "KeyError: 'no such shape'" in try_start("no such shape", "cpu", tmp_path)


def test_caches_are_spoilt(tmp_path) -> None:
    plans = {"key a": {"width": 4, "stages": 2}, "key b": None}
    (tmp_path / "deeper").mkdir()
    for path in (tmp_path / "plans.json", tmp_path / "deeper" / "other.json"):
        path.write_text(json.dumps(plans))
    empty(tmp_path)
    stale(tmp_path)
    assert json.loads((tmp_path / "plans.json").read_text()) == {
        "key a": {"old_width": 4, "old_stages": 2},
        "key b": None,
    }
    corrupt(tmp_path)
    for path in (tmp_path / "plans.json", tmp_path / "deeper" / "other.json"):
        with pytest.raises(ValueError):  # noqa: PT011
            json.loads(path.read_bytes())


# What is checked of each answer


def output(ids: tuple[int, ...] = (), reason: str | None = None, offset: int = 0, **more) -> Output:
    return Output("a", 0, offset, ids, reason, **more)


def told(logprob: float = -1.0, ids: tuple[int, ...] = (), top: tuple[float, ...] = ()):
    return (TokenLogprobs(logprob, ids, top),)


def complaints(asked: dict, *outputs: Output) -> list[str]:
    record = Record(0)
    checks = Checks(record, vocab_size=50, max_model_len=20, eos_token_ids=(2,))
    fields = {name: asked[name] for name in ("prompt_ids", "prior_output_ids") if name in asked}
    options = {key: asked[key] for key in asked if key not in {*fields, "refused", "aborted"}}
    sampling = Sampling(**{"max_tokens": 3, **options})
    submit = Submit(request_id="a", sampling=sampling, **{"prompt_ids": (4, 5), **fields})
    made = checks.expect(submit, refused=asked.get("refused", False))
    made.aborted = asked.get("aborted", False)
    for each in outputs:
        checks.see(each)
    return record.failures


RIGHT = [
    ({}, [output((7,)), output((8, 9), "length", 1)]),
    ({"stop_token_ids": (STOP,)}, [output((7,)), output((STOP,), "stop", 1)]),
    ({}, [output((2,), "stop")]),
    ({"ignore_eos": True}, [output((2, 2, 2), "length")]),
    ({"refused": True}, [output((), "error", error="no")]),
    ({"aborted": True}, [output((7,)), output((), "abort", 1)]),
    ({"prior_output_ids": (7,)}, [output((8, 9), "length", 1)]),
    ({"prior_output_ids": (7, 8, 9)}, [output((), "length", 3)]),
    ({"prompt_ids": (1,) * 19}, [output((7,), "length")]),
    ({"min_tokens": 1}, [output((7, 2), "stop")]),
    ({"bad_token_ids": ((7, 8),)}, [output((8, 7, 9), "length")]),
    ({"max_tokens": 1, "logprobs": 1}, [output((7,), "length", logprobs=told(-1, (7,), (-1,)))]),
    ({"max_tokens": 1, "prompt_logprobs": 0}, [output((7,), "length", prompt_logprobs=told())]),
]


@pytest.mark.parametrize(("asked", "outputs"), RIGHT)
def test_right_answers_pass(asked, outputs) -> None:
    assert complaints(asked, *outputs) == []


WRONG = [
    ("nobody waits", {}, [output((7, 8, 9), "length"), output((), "length", 3)]),
    ("a gap or a repeat", {}, [output((7,)), output((7,))]),
    ("a gap or a repeat", {}, [output((7,)), output((8, 9), "length", 2)]),
    ("no token of the vocabulary", {}, [output((50,))]),
    ("no token of the vocabulary", {}, [output((-1,))]),
    ("not allowed", {"allowed_token_ids": (7,)}, [output((8,))]),
    ("behind a stop token", {"stop_token_ids": (STOP,)}, [output((STOP,)), output((7,), None, 1)]),
    ("before min_tokens", {"min_tokens": 2}, [output((7, 2), "stop")]),
    ("a bad sequence", {"bad_token_ids": ((7, 8),)}, [output((7,)), output((8,), None, 1)]),
    ("a bad sequence", {"bad_token_ids": ((7, 8),), "prior_output_ids": (7,)},
     [output((8,), None, 1)]),
    ("0 log probabilities in place of 1", {"logprobs": 0}, [output((7,))]),
    ("1 log probabilities in place of 0", {}, [output((7,), logprobs=told())]),
    ("0 of the prompt in place of 1", {"prompt_logprobs": 0}, [output((7,))]),
    ("unsound", {"logprobs": 0}, [output((7,), logprobs=told(float("nan")))]),
    ("unsound", {"logprobs": 0}, [output((7,), logprobs=told(float("-inf")))]),
    ("unsound", {"logprobs": 0}, [output((7,), logprobs=told(0.5))]),
    ("unsound", {"logprobs": 1}, [output((7,), logprobs=told())]),
    ("unsound", {"logprobs": 1}, [output((7,), logprobs=told(-1, (50,), (-1,)))]),
    ("unsound", {"logprobs": 2}, [output((7,), logprobs=told(-1, (7, 8), (-2, -1)))]),
    ("ended by length after 2 of 3", {}, [output((7, 8), "length")]),
    ("ended by length after 4 of 3", {}, [output((7, 8, 9, 10), "length")]),
    ("ended by length", {}, [output((7, 8, 2), "length")]),
    ("ended by stop", {}, [output((7,), "stop")]),
    ("ended by abort", {}, [output((), "abort")]),
    ("ended by error", {}, [output((), "error", error="no")]),
    ("ended by moved", {}, [output((), "moved")]),
    ("is to be refused", {"refused": True}, [output((7, 8, 9), "length")]),
    ("cached", {}, [output((7,), cached_tokens=2)]),
    ("no time", {}, [output((7,), gpu_s=float("nan"))]),
]  # fmt: skip


@pytest.mark.parametrize(("complaint", "asked", "outputs"), WRONG)
def test_wrong_answers_do_not(complaint, asked, outputs) -> None:
    (found,) = complaints(asked, *outputs)
    assert complaint in found


def test_a_failure_names_phase_and_seed_and_thousands_do_not_pile_up() -> None:
    record = Record(7, "round 0, prompts")
    for _ in range(1000):
        record.fail("wrong")
    assert record.failures[0] == "round 0, prompts, seed 7: wrong"
    assert (len(record.failures), record.num_failures, record.full) == (100, 1000, True)


# Plants in an engine


def found(phase: str, seconds: float = 0.0) -> list[str]:
    record = Record(0, phase)
    driven = start(setting("small", "cpu"), record)
    try:
        PHASES[phase][0](driven, Random(0), time.perf_counter() + seconds)
    finally:
        driven.close()
    return record.failures


def plant(monkeypatch, change) -> None:
    """`change` what the model says of a batch."""

    class Planted(DecoderRunner):
        def forward(self, batch, input_ids, inputs, logits) -> None:
            super().forward(batch, input_ids, inputs, logits)
            change(batch, logits)

    monkeypatch.setattr("replica.process.DecoderRunner", Planted)


def test_a_wrong_token_is_found(monkeypatch) -> None:
    plant(monkeypatch, lambda batch, logits: logits.add_(torch.rand_like(logits)))
    assert any("another answer to the same prompt" in failure for failure in found("prompts"))


def test_a_wrong_token_in_company_is_found(monkeypatch) -> None:
    def lean(batch: Batch, logits: torch.Tensor) -> None:
        logits[:, len(batch.samples)] += 10.0

    plant(monkeypatch, lean)
    failures = found("prompts")
    assert failures
    assert all("in company" in failure for failure in failures)


def test_logits_that_are_no_numbers_are_found(monkeypatch) -> None:
    plant(monkeypatch, lambda batch, logits: logits.fill_(torch.nan))
    assert any("unsound log probability" in failure for failure in found("ample_traffic", 0.5))


def test_a_mask_that_is_lost_is_found(monkeypatch) -> None:
    monkeypatch.setattr(
        "replica.sampling.masks.MaskBuilder.fill", lambda self, batch, bits: bits.fill(255)
    )
    assert any("that is not allowed" in failure for failure in found("ample_traffic", 0.5))


def test_a_block_that_leaks_is_found(monkeypatch) -> None:
    release = BlockManager.release
    monkeypatch.setattr(BlockManager, "release", lambda self, blocks: release(self, blocks[1:]))
    assert any("blocks free in place of" in failure for failure in found("prompts"))


@pytest.fixture
def driven() -> Iterator[Driven]:
    made = start(setting("small", "cpu"), Record(0))
    yield made
    made.close()


def test_a_row_that_leaks_is_found(monkeypatch, driven) -> None:
    monkeypatch.setattr(torture_engine, "STALLED_S", 0.5)
    monkeypatch.setattr(driven.engine.scheduler, "_retire_rows", lambda: None)
    driven.ask((5, 6, 7))
    with pytest.raises(torture_engine.Stalled, match="running=1"):
        driven.drain()


def test_what_is_left_is_found(driven) -> None:
    driven.engine.rows.in_flight[3] = 1
    driven.drain()
    assert "a free row has tokens in flight" in driven.record.failures[0]


def test_a_request_that_its_abort_has_overtaken_is_found_if_it_starts(monkeypatch, driven) -> None:
    sampling = Sampling(max_tokens=2)
    driven.send_overtaken(Submit(request_id="a", prompt_ids=(5,), sampling=sampling))
    driven.answer((5, 6, 7))
    assert driven.record.failures == []
    monkeypatch.setattr(driven.engine, "_remember", lambda key: None)
    driven.send_overtaken(Submit(request_id="b", prompt_ids=(5,), sampling=sampling))
    driven.answer((5, 6, 7))
    assert all("nobody waits" in failure for failure in driven.record.failures)
    assert len(driven.record.failures) == 2


def test_room_for_all_is_found(monkeypatch) -> None:
    monkeypatch.setattr(Driven, "tight", lambda self, tokens: nullcontext())
    assert any("nothing was preempted" in failure for failure in found("tight_traffic"))


def test_an_engine_that_ends_is_found_and_the_next_phase_has_another(monkeypatch, capsys) -> None:
    """A step in which no row samples ends it: prompts longer than a step."""

    def fail(batch: Batch, logits: torch.Tensor) -> None:
        assert len(batch.samples), "planted"

    plant(monkeypatch, fail)
    assert torture.main(short("prompts", "costs")) == 1
    said = capsys.readouterr().out
    for phase in ("prompts", "costs"):
        assert f"round 0, {phase}, seed 0: the engine ended: StreamFailure" in said


def test_memory_that_grows_is_found(monkeypatch, capsys) -> None:
    taken = iter([0.0, 1000.0])
    monkeypatch.setattr(torture, "memory_mib", lambda device: next(taken))
    assert torture.main(short("prompts", "costs")) == 1
    assert "memory has grown by 1000 MiB" in capsys.readouterr().out


def test_memory_that_the_start_leaves_to_nobody_is_found(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torture, "unheld_mib", lambda: 560.0)
    assert torture.main(short("costs")) == 1
    assert "560 MiB of the start's memory" in capsys.readouterr().out


# What only the whole run can tell


def judged(device: str = "cuda", **found: list) -> list[str]:
    options = SimpleNamespace(shape="llama-8b", device=device, phases=list(PHASES))
    whole = torture.Torture(options, Record(0))
    for name, values in found.items():
        setattr(whole.record, name, values)
    whole.judge()
    return whole.record.failures


def test_gaps_costs_and_kernels_are_judged() -> None:
    assert judged(gaps_ms=[374.0], costs=[(119.0, 100.0)] * 10) == []
    assert judged("cpu", gaps_ms=[3760.0], costs=[(10.0, 100.0)] * 10) == []
    assert "longest_gap_over_budget is 1.5" in judged(gaps_ms=[10.0, 376.0])[0]
    assert (
        "cost_model_error_p90 is 0.3" in judged(costs=[(90.0, 100.0)] * 8 + [(70.0, 100.0)] * 2)[0]
    )
    assert "['_shape[MASKED=True]']" in judged(compiled=["_shape[MASKED=True]"] * 2)[0]


def test_a_miss_within_the_noise_is_none() -> None:
    record = Record(0, costs=[(6.0, 9.0), (6.0, 12.0), (200.0, 100.0)])
    assert record.cost_errors(noise_ms=3.0) == [0.0, 0.5, 1.0]


def test_compiled_kernels_are_counted_until_the_engine_ends(monkeypatch) -> None:
    theirs: list[str] = []
    runtime = SimpleNamespace(jit_post_compile_hook=lambda **about: theirs.append(about["repr"]))
    knobs = SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    ours: list[str] = []
    restore = on_compile(ours.append)
    runtime.jit_post_compile_hook(repr="first")
    restore()
    runtime.jit_post_compile_hook(repr="second")
    assert (ours, theirs) == (["first"], ["first", "second"])

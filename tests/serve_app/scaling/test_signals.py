from __future__ import annotations

import pytest

from replica.messages import DeviceTime, Ready, Stats
from router.workload import Workload
from serve_app.scaling.signals import LoadMeter, backlog_of, load_of, record_workload
from serve_app.scaling.types import Backlog

READY = Ready(
    model_type="llama",
    vocab_size=256,
    eos_token_ids=(0,),
    max_model_len=512,
    max_rows=8,
    block_size=16,
    num_blocks=100,
)


def stats(steps: int = 0, running: int = 0, **seconds: float) -> Stats:
    return Stats(free_blocks=100, steps=steps, running=running, time=DeviceTime(**seconds))


def test_shares_are_of_the_time_between_two_calls() -> None:
    meter = LoadMeter(READY)
    meter.measure(stats(requests=100.0, steps=1000, spare=7.0))
    told = meter.measure(
        stats(1010, requests=100.5, surplus=0.5, bubble=0.5, starved=1.5, spare=8.0)
    )
    assert (told["busy"], told["bubble"]) == (0.25, 0.125)
    assert (told["starved"], told["spare"]) == (0.375, 0.25)


def test_without_news_shares_stay_and_rows_and_blocks_are_the_last() -> None:
    meter, time = LoadMeter(READY), DeviceTime(requests=3.0, spare=1.0)
    first = meter.measure(Stats(time=time, free_blocks=100))
    again = meter.measure(Stats(time=time, free_blocks=25, running=3, waiting=1))
    assert again["busy"] == first["busy"] == 0.75
    assert (again["rows"], again["kv"]) == (0.5, 0.75)


def test_a_step_that_more_rows_could_share_is_little_work() -> None:
    """1 row of 8: all of its time was fixed, and seven eighths of that were free."""
    meter = LoadMeter(READY)
    told = meter.measure(stats(requests=1.0, steps=100, running=1))
    assert told["busy"] == 1.0
    assert told["work"] == pytest.approx(1 / 8)
    long_steps = meter.measure(stats(requests=2.0, steps=110, running=1))
    assert long_steps["work"] == pytest.approx(1 - 0.1 * 7 / 8)


def test_before_the_engine_has_told_anything_all_is_spare() -> None:
    load = load_of(LoadMeter(READY).measure(stats()))
    assert load is not None
    assert load.level == 0


def test_a_backlog_comes_back_as_it_was_recorded() -> None:
    recorded = record_workload({"Replica-m": Workload(3, (1.5, 0.0, 0.25, 0.0))}, 1, 9)
    backlog = Backlog(seconds=(1.5, 0.0, 0.25, 0.0), waiting=3, missed=1, ended=9)
    assert backlog_of(recorded, "Replica-m") == backlog_of(recorded, "Replica") == backlog


def test_each_model_has_its_own_backlog() -> None:
    told = {"Replica-a": Workload(3, (1.5, 0.0)), "Replica-b.a": Workload(1, (0.0, 0.5))}
    recorded = record_workload(told, 0, 0)
    a, b = backlog_of(recorded, "Replica-a"), backlog_of(recorded, "Replica-b.a")
    assert (a, b) == (Backlog(seconds=(1.5, 0), waiting=3), Backlog(seconds=(0, 0.5), waiting=1))
    assert backlog_of(recorded, "Replica-c") == Backlog()


def test_a_request_that_waited_for_a_moment_of_the_window_counts() -> None:
    recorded = record_workload({"Replica-m": Workload(1, (0.1,))}, 0, 0)
    told = backlog_of(recorded | {"waiting.Replica-m": 0.2}, "Replica")
    assert told is not None
    assert told.waiting == 1


@pytest.mark.parametrize("name", ["busy", "spare", "work", "kv"])
def test_half_a_report_is_none(name: str) -> None:
    recorded = LoadMeter(READY).measure(stats())
    del recorded[name]
    assert load_of(recorded) is None
    assert backlog_of({"missed": 1.0}, "Replica") is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_silence(value: float) -> None:
    """One replica's nonsense does not keep the others' load from being seen."""
    recorded = LoadMeter(READY).measure(stats())
    assert load_of(recorded | {"busy": value}) is None
    workload = record_workload({"Replica": Workload(3, (value,))}, 0, 0)
    assert backlog_of(workload, "Replica") is None

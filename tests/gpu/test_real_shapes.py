"""Engines as they are served: shapes of real models in bfloat16, with the kernels, plans, graphs
and budgets that tiny float32 models never reach. One engine per shape: a start takes long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

from benchmarks.torture import (
    LAUNCH_NOISE,
    MAX_COST_ERROR,
    MAX_GAP_OVER_BUDGET,
    MAX_GROWTH_MIB,
    MAX_UNHELD_MIB,
)
from benchmarks.torture_checks import Record
from benchmarks.torture_engine import Driven, memory_mib, setting, start, unheld_mib
from benchmarks.torture_phases import PHASES
from benchmarks.torture_start import starts


@dataclass
class World:
    driven: Driven
    failed_starts: list[str]
    unheld_mib: float
    """What nobody held any more once the engine was there."""

    def go_through(self, phase: str, seconds: float = 0.0) -> Record:
        """Once at least. The answers must be right, and everything given back."""
        record = self.driven.record
        record.phase = phase
        PHASES[phase][0](self.driven, Random(0), time.perf_counter() + seconds)
        failures, record.failures = record.failures, []
        assert failures == []
        return record


@pytest.fixture(scope="module", params=["llama-1b", "llama-8b"])
def world(request, tmp_path_factory) -> Iterator[World]:
    unheld_mib()  # what went before
    tried = Record(seed=0)
    # Before an engine here takes the memory.
    caches = starts(request.param, "cuda", tmp_path_factory.mktemp(request.param), tried)
    driven = start(setting(request.param, "cuda", cache_dir=str(caches)), Record(seed=0))
    made = World(driven, tried.failures, unheld_mib())
    yield made
    driven.close()
    del driven, made.driven
    unheld_mib()


def test_it_starts_whatever_the_folder_of_caches_holds(world):
    """None, of a version with other fields, files cut short and files of noise."""
    assert world.failed_starts == []


def test_the_start_gives_back_what_it_took_to_measure(world):
    assert world.unheld_mib <= MAX_UNHELD_MIB


def test_prompts_of_every_critical_length_alone_and_in_company(world):
    """Among them some longer than a step, in which then no row samples."""
    world.go_through("prompts")
    assert world.driven.steps_without_samples > 0


def test_random_traffic_with_room_and_without(world):
    world.go_through("ample_traffic", 30)
    before = memory_mib("cuda")
    assert world.go_through("tight_traffic", 30).preemptions > 0
    assert memory_mib("cuda") - before <= MAX_GROWTH_MIB


def test_a_long_prompt_holds_up_no_stream_for_longer_than_the_budget(world):
    gaps = world.go_through("beside_a_long_prompt").gaps_ms
    assert max(gaps) <= MAX_GAP_OVER_BUDGET * world.driven.config.step_budget_ms


def test_the_cost_of_chunks_is_known_at_any_depth(world):
    record = world.go_through("costs", 10)
    noise_ms = LAUNCH_NOISE * world.driven.config.step_budget_ms
    assert np.quantile(record.cost_errors(noise_ms), 0.9) <= MAX_COST_ERROR, record.costs


def test_nothing_was_compiled_since_the_start(world):
    """Behind all of the above."""
    assert world.driven.engine.scheduler.num_steps > 1000
    assert world.driven.record.compiled == []
    assert world.driven.stats.compiled == 0

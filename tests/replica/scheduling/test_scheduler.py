"""The scheduler alone, against a world that collects steps one behind, as the pipeline does."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.messages import Sampling, Submit
from replica.scheduling.batch import Batch, StepOutput
from replica.scheduling.block_manager import BlockManager
from replica.scheduling.rows import Rows
from replica.scheduling.scheduler import MAX_OVERTAKEN, Scheduler
from replica.scheduling.sequence import Constraint, Sequence

SIZE = 4
CONTEXT = 64
EOS = 2


def request(name: str, prompt: int | list[int], max_tokens: int = 4, band: int = 0) -> Sequence:
    ids = tuple(range(3, 3 + prompt)) if isinstance(prompt, int) else tuple(prompt)
    submit = Submit(
        request_id=name, prompt_ids=ids, sampling=Sampling(max_tokens=max_tokens), band=band
    )
    return Sequence.from_submit(submit, max_model_len=CONTEXT, eos_token_ids=(EOS,))


class World:
    """Launches what is scheduled; collects the step before. Checks ownership on the way."""

    def __init__(self, *, rows: int = 4, blocks: int = 64, tokens: int = 16) -> None:
        self.rows = Rows(rows, CONTEXT, SIZE, guard=blocks)
        self.blocks = BlockManager(blocks, SIZE)
        self.scheduler = Scheduler(self.rows, self.blocks, max_step_tokens=tokens)
        self.flight: deque[Batch] = deque()
        self.batches: list[Batch] = []
        self.owners: dict[int, list[Sequence]] = {}
        """Whose the rows of each step were when it was launched."""
        self.produced: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def step(self, token: int = 9, *, overlap: bool = True) -> Batch | None:
        batch = self.scheduler.schedule()
        if batch is not None:
            self.flight.append(batch)
            self.batches.append(batch)
            self.owners[batch.step] = [self.rows.sequence(row) for row in batch.rows.tolist()]
            self._check_writes(batch)
        depth = 1 if overlap and batch is not None else 0
        output = self._collect(token) if len(self.flight) > depth else None
        self.scheduler.update(output)
        for one in self.scheduler.take_outputs():
            known = self.produced.setdefault(one.request_id, [])
            assert one.offset == len(known)
            known.extend(one.token_ids)
            if one.finish_reason:
                assert one.request_id not in self.reasons
                self.reasons[one.request_id] = one.finish_reason
        return batch

    def drain(self) -> None:
        for _ in range(2000):
            if not (self.scheduler.has_work or self.flight or self.scheduler.outputs):
                return
            self.step()
        raise AssertionError("work is left and nothing moves")

    def chunk(self, batch: Batch | None, name: str) -> int:
        """Tokens that the step computes for a request."""
        assert batch is not None
        names = [sequence.request_id for sequence in self.owners[batch.step]]
        return int(batch.lengths[names.index(name)]) if name in names else 0

    def _collect(self, token: int) -> StepOutput:
        batch = self.flight.popleft()
        return StepOutput(batch, np.full(len(batch.samples), token, np.int64))

    def _check_writes(self, batch: Batch) -> None:
        """C04: a block that a step in flight names belongs to the same sequence still."""
        for flying in self.flight:
            owners = self.owners[flying.step]
            for row, sequence in zip(flying.rows.tolist(), owners, strict=True):
                assert self.rows.sequences[row] is sequence, "row released in flight"
        for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True):
            named = self.rows.block_table[row, : -(-(start + length) // SIZE)]
            assert (named < self.rows.guard).all(), "a token without a place"
        for row in batch.rows[batch.samples]:
            assert self.rows.known[row] + self.rows.in_flight[row] <= self.rows.limit[row]


def test_running_rows_come_first_then_prompts_within_the_budget():
    world = World(tokens=8)
    world.add(request("a", 3))
    world.step()
    world.add(request("b", 20))
    batch = world.step()
    assert (world.chunk(batch, "a"), world.chunk(batch, "b")) == (1, 7)
    assert batch is not None
    assert batch.num_tokens <= 8


def test_nothing_is_scheduled_beyond_max_tokens():
    """The token in flight counts: no surplus row is ever computed for a length known before."""
    world = World()
    world.add(request("a", 3, max_tokens=3))
    world.drain()
    assert world.produced["a"] == [9, 9, 9]
    assert world.reasons == {"a": "length"}
    assert world.scheduler.counts["surplus_rows"] == 0
    assert len(world.batches) == 3


@pytest.mark.parametrize("prompt", [CONTEXT - 2, CONTEXT - 1])
def test_the_context_end_limits_the_answer(prompt):
    """C31 at the engine: a prompt of L-1 tokens yields exactly one."""
    world = World()
    world.add(request("a", prompt, max_tokens=10**9))
    world.drain()
    assert len(world.produced["a"]) == CONTEXT - prompt
    assert world.reasons["a"] == "length"


def test_the_row_computed_beyond_an_unforeseen_end_is_surplus():
    world = World()
    world.add(request("a", 3, max_tokens=20))
    world.step()
    world.step(token=EOS)
    world.drain()
    assert world.produced["a"] == [EOS]
    assert world.reasons == {"a": "stop"}
    assert world.scheduler.counts["surplus_rows"] == 1


def test_a_newcomer_is_not_stalled_by_a_long_prompt():
    """C46: budget 64, a hog of 3,200 tokens (scaled to the context here), a prompt of 4."""
    world = World(tokens=8)
    world.add(request("hog", 60))
    world.step()
    world.add(request("new", 4))
    for _ in range(3):
        world.step()
    assert world.produced["new"]
    assert not world.produced.get("hog")
    world.drain()
    assert world.reasons.keys() == {"hog", "new"}


def test_a_newcomer_is_not_stalled_by_many_long_prompts():
    """C46 with 50 hogs; each hog still goes on in every step that has a budget left."""
    world = World(rows=64, blocks=2000, tokens=80)
    world.add(*(request(f"hog{i}", 60) for i in range(50)))
    world.step()
    world.add(request("new", 4))
    for _ in range(3):
        world.step()
    assert world.produced["new"]
    world.drain()
    assert len(world.reasons) == 51


def test_a_head_that_does_not_fit_lets_others_pass_but_not_for_ever():
    """R37: head needs more blocks than are free, tails need one."""
    world = World(rows=8, blocks=16)
    world.add(request("runs", 30, max_tokens=30))
    world.step()
    world.add(request("head", 50, max_tokens=4))
    for number in range(MAX_OVERTAKEN * 2):
        world.add(request(f"tail{number}", [number + 10], max_tokens=1))
    while "head" not in world.reasons:
        world.step()
    passed = sum(name.startswith("tail") for name in world.reasons)
    assert 0 < passed <= MAX_OVERTAKEN + world.rows.max_rows
    world.drain()


def test_a_preempted_sequence_goes_on_before_older_ones_that_never_began():
    """C runs; B is older than A but does not fit; A overtakes it, and is preempted when C grows."""
    world = World(rows=3, blocks=8)
    c, b, a = request("C", 11, 20), request("B", 28, 4), request("A", 8, 12)
    world.add(c)
    world.step()
    world.add(b, a)
    while not world.scheduler.counts["preemptions"]:
        world.step()
    assert b.overtaken == 1
    while a.row is not None:
        world.step()
    assert world.scheduler.waiting == [a, b]
    world.drain()
    assert world.reasons == dict.fromkeys("ABC", "length")


def test_the_newest_of_the_lowest_class_is_preempted_and_keeps_its_tokens():
    world = World(blocks=16)
    names = ["old", "low", "new"]
    world.add(*(request(n, [5, 6, 7 + i], 56, band=n == "low") for i, n in enumerate(names)))
    for _ in range(200):
        world.step()
        if world.scheduler.counts["preemptions"]:
            break
    [victim] = [s for s in world.rows.sequences if s and world.rows.preempted[s.row]] or (
        world.scheduler.waiting
    )
    assert victim.request_id == "low"
    world.drain()
    assert all(world.produced[name] == [9] * 56 for name in names)


def test_blocks_are_not_given_away_while_a_step_names_them():
    """C04: the victim's blocks come once its step in flight is collected, not before."""
    world = World(rows=2, blocks=20)
    world.add(request("a", [5] * 30, 30), request("b", [6] * 30, 30))
    while not world.scheduler.counts["preemptions"]:
        world.step()  # checks that no step in flight loses its rows or blocks
    assert world.scheduler.waiting or any(world.rows.preempted)
    world.drain()
    assert {name: len(ids) for name, ids in world.produced.items()} == {"a": 30, "b": 30}


def test_an_abort_marks_and_releases_nothing():
    world = World()
    free = world.blocks.num_free
    world.add(request("a", 10, max_tokens=20))
    world.step()
    world.scheduler.abort(("a", 0))
    assert world.blocks.num_free < free
    world.drain()
    assert world.reasons == {"a": "abort"}
    assert world.produced["a"] == []
    assert world.blocks.num_free == free


def test_aborting_what_waits_gives_its_place_back_at_once():
    """R26: nothing that a prefix match pinned is leaked."""
    world = World(rows=1)
    world.add(request("warm", 12), request("a", 12), request("b", 12))
    world.step()
    world.scheduler.abort(("b", 0))
    world.scheduler.abort(("a", 0))
    assert world.scheduler.waiting == []
    world.drain()
    assert world.blocks.num_free == world.blocks.num_blocks


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.sampled_from([9, 9, 9, EOS])),
    ),
    max_size=120,
)


@given(OPERATIONS, st.booleans(), st.integers(16, 24), st.integers(4, 24))
@settings(max_examples=300, deadline=None)
def test_every_schedule_ends_with_everything_released(operations, overlap, blocks, tokens):
    """Any order of arrivals, cancels, ends and preemptions, in pools that are too small."""
    world = World(rows=4, blocks=blocks, tokens=tokens)
    names: list[str] = []
    lengths: dict[str, int] = {}
    for operation in operations:
        match operation:
            case ("add", prompt, max_tokens, kind):
                name = f"r{len(names)}"
                ids = [kind] * prompt if kind < 2 else list(range(10, 10 + prompt))
                world.add(request(name, ids, max_tokens, band=kind % 2))
                names.append(name)
                lengths[name] = max_tokens
            case ("abort", index) if index < len(names):
                world.scheduler.abort((names[index], 0))
            case ("step", token):
                world.step(token, overlap=overlap)
    world.drain()
    assert world.reasons.keys() == set(names)
    for name, reason in world.reasons.items():
        if reason == "length":
            assert len(world.produced[name]) == lengths[name]
    assert world.blocks.num_free == blocks
    assert world.rows.num_used == 0
    assert not world.rows.in_flight.any()
    assert world.scheduler.waiting == []
    assert sum(world.scheduler.finished.values()) == len(names)


class NeverReady(Constraint):
    """A grammar that is being compiled."""

    def ready(self, timeout_s: float = 0.0) -> bool:
        return False


def test_a_row_that_was_given_back_before_any_step_is_asked_nothing():
    """A prompt of one token waits for its grammar and is aborted; then somebody has penalties."""
    world = World()
    waits, penalised = request("waits", 1), request("penalised", 3)
    waits.constraint = NeverReady()
    penalised.sampling = Sampling(max_tokens=4, presence_penalty=1.0)
    world.add(waits)
    assert world.step() is None
    assert waits.row is not None
    world.scheduler.abort(waits.key)
    world.step()
    world.add(penalised)
    world.drain()
    assert world.reasons == {"waits": "abort", "penalised": "length"}

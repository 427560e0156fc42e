"""Rules for what a row may sample: alone, together, and while one of them is not known yet."""

from __future__ import annotations

import numpy as np
import pytest

from replica.messages import Abort
from replica.scheduling.sequence import Constraint
from tests.script import EOS, VOCAB, Bench, ScriptRunner, counting, submit

BOTH = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])


class Alternating(Constraint):
    """Allows one token, which depends on all that came before (a grammar in miniature)."""

    def fill(self, output_ids, bits):
        flags = np.zeros(VOCAB, bool)
        flags[20 + int(output_ids.sum() + len(output_ids)) % 20] = True
        bits[:] = np.packbits(flags, bitorder="little")


@BOTH
def test_masks_see_every_sampled_token_and_touch_no_neighbour(bench, overlap):
    """C10, X5: rows with and without rules join, leave, move and are preempted."""
    engine = bench(overlap=overlap, kv_tokens=64)
    engine.send(*(submit(f"r{i}", [5] * (1 + i), max_tokens=20) for i in range(8)))
    receive = engine.engine._sequence

    def with_rule(command):
        sequence = receive(command)
        if int(command.request_id[1:]) % 2:
            sequence.constraint = Alternating()
        return sequence

    engine.engine._sequence = with_rule
    outputs = engine.run()
    for i in range(8):
        expected: list[int] = []
        for j in range(20):
            ruled = 20 + (sum(expected) + len(expected)) % 20
            expected.append(ruled if i % 2 else counting("", 1 + i + j))
        assert outputs[f"r{i}"] == expected
    assert engine.engine.stats().preemptions > 0


class Late(Alternating):
    """One that is being compiled until the test says otherwise."""

    compiled = False

    def ready(self, timeout_s=0.0):
        return self.compiled

    def fill(self, output_ids, bits):
        assert self.compiled, "the step loop would wait here, and everybody with it"
        super().fill(output_ids, bits)


@BOTH
@pytest.mark.parametrize("length", [1, 2, 11])
def test_a_grammar_that_is_being_compiled_holds_nobody_up_but_its_own_row(bench, overlap, length):
    """All but the last token of its prompt is computed meanwhile."""
    runner = ScriptRunner()
    engine, late = bench(runner, overlap=overlap, max_step_tokens=4), Late()
    receive = engine.engine._sequence

    def with_rule(command):
        sequence = receive(command)
        sequence.constraint = late if command.request_id != "b" else None
        return sequence

    engine.engine._sequence = with_rule
    engine.send(submit("a", [5] * length, max_tokens=3), submit("b", max_tokens=30))
    engine.send(submit("cancelled", [7] * length, max_tokens=3))
    engine.step(50)
    assert engine.outputs() == {"b": [counting("", 3 + i) for i in range(30)]}
    assert len(runner.fed["a"]) == length - 1
    engine.send(Abort(request_id="cancelled"))
    engine.step(3)
    late.compiled = True
    assert engine.run()["a"] == [20, 21, 23]
    assert engine.endings() == {"a": "length", "b": "length", "cancelled": "abort"}


def test_bad_tokens_yield_where_nothing_else_is_allowed():
    engine = Bench(ScriptRunner())
    bad = {"allowed_token_ids": (20, 21), "bad_token_ids": ((20, 20), (21,))}
    assert engine.run(submit("a", max_tokens=3, **bad)) == {"a": [20, 20, 20]}
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_left_where_stops_are_held_back_and_others_are_bad(temperature):
    """Each rule alone leaves a token, all together leave none: bad tokens yield."""
    engine = Bench(ScriptRunner())
    rules = {"allowed_token_ids": (EOS, 20), "bad_token_ids": ((20,),), "min_tokens": 3}
    outputs = engine.run(
        submit("a", max_tokens=9, temperature=temperature, **rules), submit("b", max_tokens=6)
    )
    assert outputs["a"] == [20, 20, 20, EOS]
    assert outputs["b"] == [13, 14, 15, 16, 17, 18]
    engine.close()

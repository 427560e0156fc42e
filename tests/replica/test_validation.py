"""A message that cannot be run, or even read, refuses its own request and nothing else."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.messages import MAX_BIASES, Command, Malformed, encode, read_command
from replica.process import SocketChannel
from replica.scheduling.sequence import MAX_STOP_IDS
from replica.validation import MAX_BAD_SEQUENCES, MAX_GRAMMAR_CHARS, check_submit
from tests.script import EOS, VOCAB, Bench, ScriptRunner, counting, submit

GOOD = [counting("", 3 + i) for i in range(8)]

BAD: list[dict[str, Any]] = [
    {"seed": 2**64},
    {"seed": -1},
    {"choice": -1},
    {"choice": 2**63},
    {"min_tokens": 2**31},
    {"min_tokens": -1},
    {"max_tokens": 0},
    {"max_tokens": 2**63},
    {"top_k": 2**63},
    {"top_k": -1},
    *({name: bad} for name in ("temperature", "top_p", "min_p") for bad in (-1.0, math.inf)),
    {"top_p": 1.1},
    {"min_p": 1.1},
    {"temperature": 1e39},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"presence_penalty": -math.inf},
    {"frequency_penalty": 1e39},
    *(
        {name: math.nan}
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    ),
    {"logit_bias": ((1, math.nan),)},
    {"logit_bias": ((1, math.inf), (2, -math.inf))},
    {"logit_bias": ((1, 1.0), (1, 1.0))},
    {"logit_bias": ((VOCAB, 1.0),)},
    {"logit_bias": tuple((1, 0.0) for _ in range(MAX_BIASES + 1))},
    {"prior_output_ids": (VOCAB,)},
    {"prior_output_ids": (-5,)},
    {"prior_output_ids": (5,) * 9, "max_tokens": 8},
    {"stop_token_ids": (VOCAB,)},
    {"stop_token_ids": tuple(range(MAX_STOP_IDS + 1))},
    {"allowed_token_ids": (-1,)},
    {"allowed_token_ids": (5,) * (VOCAB + 1)},
    {"allowed_token_ids": ()},
    {"bad_token_ids": ((),)},
    {"bad_token_ids": ((VOCAB,),)},
    {"bad_token_ids": ((5,),) * (MAX_BAD_SEQUENCES + 1)},
    {"bad_token_ids": ((5,) * 20_000,)},
    {"logprobs": -1},
    {"logprobs": 21},
    {"prompt_logprobs": 2**40},
    {"grammar": "x" * (MAX_GRAMMAR_CHARS + 1)},
    {"grammar": "x"},
    {"band": -1},
    {"band": 2**62},
]


def start(bench: Callable[..., Bench]) -> Bench:
    """An engine in the middle of a good answer."""
    engine = bench(ScriptRunner())
    engine.send(submit("good", max_tokens=len(GOOD)))
    engine.step(3)
    return engine


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad)[:60])
def test_a_value_that_cannot_be_run_refuses_its_own_request(
    bench: Callable[..., Bench], bad: dict[str, Any]
) -> None:
    engine = start(bench)
    outputs = engine.run(submit("bad", **{"temperature": 1.0, **bad}), submit("next"))
    assert engine.endings() == {"good": "length", "bad": "error", "next": "length"}
    assert (outputs["good"], outputs["next"]) == (GOOD, GOOD[:4])
    assert next(output.error for output in engine.reported if output.request_id == "bad")


@pytest.mark.parametrize("length", [0, 64, 65])
def test_a_prompt_that_does_not_fit_is_refused_with_a_sentence(length: int) -> None:
    one = submit("a", (5,) * length)
    with pytest.raises(ValueError, match="prompt"):
        check_submit(one, VOCAB, 64)


@pytest.mark.parametrize(
    "extreme",
    [
        {"seed": 2**64 - 1, "choice": 2**30},
        {"min_tokens": 2**30, "max_tokens": 2**30},
        {"top_k": 2**30, "top_p": 0.0, "min_p": 1.0},
        {"temperature": 1e6, "presence_penalty": 1e6, "frequency_penalty": -1e6},
        {"temperature": sys.float_info.min, "repetition_penalty": 1e6},
        {"logit_bias": tuple((token, -1e6) for token in range(VOCAB))},
        {"allowed_token_ids": (EOS,)},
        {"bad_token_ids": tuple((token,) for token in range(VOCAB))},
        {"band": 255, "logprobs": 20, "prompt_logprobs": 20},
        {"prior_output_ids": (5,) * 4, "max_tokens": 4},
        {"prior_output_ids": (5,) * 90, "max_tokens": 100},
    ],
    ids=lambda extreme: str(extreme)[:60],
)
def test_the_last_value_that_can_be_run_harms_nobody(
    bench: Callable[..., Bench], extreme: dict[str, Any]
) -> None:
    engine = start(bench)
    outputs = engine.run(submit("edge", **{"temperature": 1.0, **extreme}), submit("next"))
    assert engine.endings()["edge"] in {"length", "stop"}
    assert (outputs["good"], outputs["next"]) == (GOOD, GOOD[:4])


def on_the_wire(**changed: Any) -> bytes:
    sampling = {"max_tokens": 4, "temperature": 0.0}
    whole = {"type": "submit", "request_id": "bad", "prompt_ids": [5, 6], "sampling": sampling}
    return msgspec.msgpack.encode(whole | changed)


UNREADABLE = [
    b"",
    b"\xc1",
    b"\xff" * 100,
    b"\x91" * 100_000,
    b"\xdd\xff\xff\xff\xff",
    b"\x81\xa4type\xa4\xff\xff\xff\xff",
    on_the_wire()[:-3],
    on_the_wire(request_id=7),
    on_the_wire(request_id="x" * 5000),
    msgspec.msgpack.encode({"type": "abort", "request_id": None}),
]


@pytest.mark.parametrize("data", UNREADABLE, ids=lambda data: repr(data[:20]))
def test_what_names_no_request_is_passed_over(data: bytes) -> None:
    assert read_command(data) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_ids": "text"},
        {"prompt_ids": [1.5]},
        {"sampling": {}},
        {"sampling": {"max_tokens": "many"}},
        {"sampling": {"max_tokens": 1, "seed": None}},
        {"band": "first"},
        {"cache_salt": "x" * 5000},
        {"type": "suspend"},
    ],
    ids=lambda changed: str(changed)[:60],
)
def test_what_names_its_request_refuses_that(
    bench: Callable[..., Bench], changed: dict[str, Any]
) -> None:
    command = read_command(on_the_wire(**changed))
    assert isinstance(command, Malformed)
    engine = start(bench)
    outputs = engine.run(command, command)
    assert engine.endings() == {"good": "length", "bad": "error"}
    assert outputs["good"] == GOOD


def test_a_malformed_repetition_does_not_end_what_runs(bench: Callable[..., Bench]) -> None:
    engine = start(bench)
    assert engine.run(Malformed("good")) == {"good": GOOD}
    assert engine.endings() == {"good": "length"}


def test_the_engine_s_socket_outlives_what_cannot_be_read(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender:
        sender.bind(address)
        channel = SocketChannel(address)
        last = submit("good")
        for data in (*UNREADABLE, on_the_wire(band=None), encode(last)):
            sender.send(data)
        received: list[Command | Malformed] = []
        while last not in received:
            received += channel.receive(5.0)
        assert [type(command) for command in received] == [Malformed, type(last)]
        channel.close()


ODD = (
    st.sampled_from([0, 1, -1, 2, 5, 63, 64, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1])
    | st.floats(width=64)
    | st.sampled_from([0.0, 0.5, 1.0, 1e-320, 1e38, 1e39, math.nan, math.inf, -math.inf])
    | st.sampled_from([None, True, "", "a", b"\xff"])
)
ODDS = ODD | st.lists(ODD, max_size=4) | st.lists(st.lists(ODD, max_size=2), max_size=3)
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 9) | ODD},
    optional={
        "min_tokens": st.integers(0, 9) | ODD,
        "temperature": st.floats(0, 2) | ODD,
        "top_k": st.integers(0, 70) | ODD,
        "top_p": st.floats(0, 1) | ODD,
        "min_p": st.floats(0, 1) | ODD,
        "repetition_penalty": st.floats(0.5, 2) | ODD,
        "presence_penalty": st.floats(-2, 2) | ODD,
        "frequency_penalty": st.floats(-2, 2) | ODD,
        "logit_bias": st.lists(st.tuples(st.integers(-1, 64) | ODD, ODD), max_size=4) | ODDS,
        "logprobs": st.integers(0, 20) | ODD,
        "seed": st.integers(0, 2**64 - 1) | ODD,
        "choice": st.integers(0, 9) | ODD,
        "stop_token_ids": st.lists(st.integers(-1, 64), max_size=40) | ODDS,
        "ignore_eos": st.booleans() | ODD,
        "prompt_logprobs": st.integers(0, 20) | ODD,
        "allowed_token_ids": st.lists(st.integers(-1, 64), max_size=5) | ODDS,
        "grammar": st.sampled_from(["", "x"]) | ODD,
        "bad_token_ids": st.lists(st.lists(st.integers(-1, 64), max_size=3), max_size=3) | ODDS,
    },
)
MESSAGES = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["submit"] * 6 + ["abort", "backlog", "nothing"]),
        "request_id": st.sampled_from(["a", "b", "c"]) | ODD,
    },
    optional={
        "attempt": st.integers(0, 1) | ODD,
        "epoch": ODD,
        "prompt_ids": st.lists(st.integers(0, 63), min_size=1, max_size=70) | ODDS,
        "prior_output_ids": st.lists(st.integers(-1, 64), max_size=6) | ODDS,
        "sampling": SAMPLING | ODDS,
        "cache_salt": st.text(max_size=3) | ODD,
        "band": st.integers(0, 2) | ODD,
        "waiting": st.booleans() | ODD,
    },
)


@settings(max_examples=150, deadline=None)
@given(st.lists(MESSAGES.map(msgspec.msgpack.encode) | st.binary(max_size=40), max_size=8))
def test_whatever_comes_the_engine_lives_and_good_neighbours_do_not_notice(
    messages: list[bytes],
) -> None:
    engine = Bench(ScriptRunner())
    try:
        engine.send(submit("good", max_tokens=len(GOOD)))
        for data in messages:
            engine.step()
            command = read_command(data)
            engine.send(*([] if command is None else [command]))
        outputs = engine.run(submit("next", attempt=9))
        assert (outputs["good"], outputs["next"]) == (GOOD, GOOD[:4])
    finally:
        engine.close()

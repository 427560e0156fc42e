"""Grammars of many tenants: in fair order, bounded, and each tried once."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from typing import Any

import pytest
from llguidance import LLMatcher

from serve_app.protocol.backend import Refused
from serve_app.text.grammar_trial import GrammarTrial, TooComplex, TrialProcess
from tests.serve_app.text.test_grammars import chain


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def bomb(number: int) -> str:
    """It ends its process."""
    return LLMatcher.grammar_from_lark(chain(4000 + number))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the processes are given."""
    tried: list[str] = []
    error = TrialProcess.error

    def noted(self: TrialProcess, grammar: str) -> str | None:
        tried.append(grammar)
        return error(self, grammar)

    monkeypatch.setattr(TrialProcess, "error", noted)
    return tried


async def test_nobody_waits_for_the_hard_grammars_of_another() -> None:
    trial = GrammarTrial()
    warm_up = (trial.error(tenant, regex("a")) for tenant in ("victim", "attacker"))
    assert await asyncio.gather(*warm_up) == ["", ""]
    hard = [asyncio.create_task(trial.error("attacker", bomb(number))) for number in range(4)]
    await asyncio.sleep(0.1)
    for number in range(3):
        assert await trial.error("victim", regex(f"b{number}")) == ""
    assert sum(task.done() for task in hard) <= 1
    results = await asyncio.gather(*hard, return_exceptions=True)
    assert [type(result) for result in results] == [TooComplex] * 4


async def test_a_grammar_is_tried_once(tried: list[str]) -> None:
    trial = GrammarTrial(max_waiting=1)
    many = await asyncio.gather(*(trial.error("a", regex("a+")) for _ in range(20)))
    assert many == [""] * 20
    assert "unclosed" in await trial.error("a", regex("(a"))
    assert "unclosed" in await trial.error("a", regex("(a"))
    for _ in range(2):
        with pytest.raises(TooComplex):
            await trial.error("a", bomb(0))
    assert tried == [regex("a+"), regex("(a"), bomb(0)]
    await trial.error("b", regex("a+"))
    assert tried[3:] == [regex("a+")], "how long it takes would tell what others ask for"


async def test_no_more_verdicts_are_kept_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, tried: list[str]
) -> None:
    monkeypatch.setattr("serve_app.text.grammar_trial.MAX_VERDICTS", 2)
    trial = GrammarTrial()
    for pattern in ("a", "b", "a", "c", "a", "b"):
        await trial.error("t", regex(pattern))
    assert tried == [regex(pattern) for pattern in "abcb"]


async def test_what_waits_of_one_tenant_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, go_on = GrammarTrial(max_waiting=2), threading.Event()

    def slow(self: TrialProcess, grammar: str) -> str:
        assert grammar == "b" or go_on.wait(10)
        return ""

    monkeypatch.setattr(TrialProcess, "error", slow)
    asked = [asyncio.create_task(trial.error("a", str(number))) for number in range(6)]
    assert await trial.error("b", "b") == ""
    go_on.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [str] * 3 + [Refused] * 3


async def test_a_trial_goes_on_when_its_client_is_gone(tried: list[str]) -> None:
    trial = GrammarTrial()
    task = asyncio.create_task(trial.error("a", regex("x")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await trial.error("a", regex("x")) == ""
    assert tried == [regex("x")]


async def test_a_process_that_could_not_start_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = GrammarTrial()

    def fails(*_: object) -> None:
        raise OSError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(TrialProcess, "error", fails)
        with pytest.raises(OSError, match="no more"):
            await trial.error("a", regex("a"))
    assert await trial.error("a", regex("a")) == ""


async def test_too_little_time_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says more about how busy the machine is than about the grammar."""
    trial = GrammarTrial()
    assert await trial.error("a", regex("a")) == ""
    with monkeypatch.context() as patch:
        patch.setattr("serve_app.text.grammar_trial.WALL_S", 0.0)
        for _ in range(2):
            with pytest.raises(TooComplex):
                await trial.error("a", regex("b"))
    assert await trial.error("a", regex("b")) == ""
    assert "unclosed" in await trial.error("a", regex("(a")), "answers are not mixed up"


async def test_who_ends_a_process_waits_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def noted(*args: Any, **options: Any) -> Any:
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    process = TrialProcess()
    assert await asyncio.to_thread(process.error, bomb(1)) is None
    assert len(started) == 2
    assert await asyncio.to_thread(process.error, regex("a")) == ""
    assert len(started) == 2

"""A process that can do its work no longer ends; others go on."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from serve_app.fleet.liveness import LivenessCheck

PROCESS = """
import asyncio, time
from serve_app.fleet.liveness import LivenessCheck

asked = []

def check():
    asked.append(1)
    {check}

async def main():
    LivenessCheck(check, period_s=0.02, timeout_s=0.1).start()
    {work}

asyncio.run(main())
print("came to its end")
"""


def outcome(check: str, work: str) -> tuple[int, str]:
    """Exit status, and all that was printed and logged."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS.format(check=check, work=work)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("check", "work", "why"),
    [
        ("raise RuntimeError('no engine')", "await asyncio.sleep(30)", "no engine"),
        ("pass", "time.sleep(30)", "event loop has been busy"),
    ],
    ids=["its work cannot go on", "its loop hangs"],
)
def test_a_process_that_cannot_go_on_ends_and_says_why(check: str, work: str, why: str) -> None:
    status, said = outcome(check, work)
    assert status == 1
    assert why in said
    assert "came to its end" not in said


@pytest.mark.parametrize(
    ("check", "work"),
    [
        ("pass", "await asyncio.sleep(1)"),
        ("if len(asked) % 3: raise RuntimeError", "await asyncio.sleep(1)"),
        ("pass", "[(time.sleep(0.15), await asyncio.sleep(0.1)) for _ in range(4)]"),
    ],
    ids=["all is well", "a failure or two", "a loop that is slow now and then"],
)
def test_a_process_that_recovers_goes_on(check: str, work: str) -> None:
    assert outcome(check, work)[0] == 0


async def test_once_stopped_it_asks_no_more() -> None:
    asked = asyncio.Event()
    one = LivenessCheck(asked.set, period_s=0.01)
    one.start()
    await asked.wait()
    one.stop()
    await asyncio.to_thread(one.join)
    asked.clear()
    await asyncio.sleep(0.05)
    assert not asked.is_set()

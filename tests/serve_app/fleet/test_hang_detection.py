from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from serve_app.fleet.hang_detection import HangDetector, core_waits


def test_time_in_which_the_engine_could_run_counts_until_it_reports() -> None:
    detector = HangDetector(0.5, {})
    for _ in range(4):
        detector.look(0.5, {})
    assert detector.counted_s == 2
    detector.heard()
    assert detector.counted_s == 0


def test_a_late_look_counts_as_one_in_time() -> None:
    detector = HangDetector(0.5, {})
    detector.look(30, {})
    assert detector.counted_s == 0.5


def test_a_wait_for_a_core_does_not_count_even_when_it_is_told_late() -> None:
    detector = HangDetector(0.5, {1: 10.0, 2: 0.0})
    for _ in range(4):
        detector.look(0.5, {1: 10.0, 2: 0.0})
    detector.look(0.5, {1: 10.1, 2: 2.0})
    assert detector.counted_s == pytest.approx(0.5)


def test_what_a_new_thread_waited_before_it_was_seen_excuses_nothing() -> None:
    detector = HangDetector(0.5, {})
    detector.look(0.5, {3: 100.0})
    assert detector.counted_s == 0.5


def test_the_kernel_tells_a_process_without_a_core_from_one_that_stopped() -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    rivals = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(4)]
    try:
        time.sleep(0.3)
        before = core_waits(rivals[0].pid)
        time.sleep(0.8)
        between = core_waits(rivals[0].pid)
        rivals[0].send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        stopped = core_waits(rivals[0].pid)
        time.sleep(0.5)
        assert sum(between.values()) - sum(before.values()) > 0.3
        assert core_waits(rivals[0].pid) == stopped
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert core_waits(rivals[0].pid) == {}

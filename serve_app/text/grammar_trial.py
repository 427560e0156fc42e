"""Tries grammars out in a process of their own, before an engine meets them.

A grammar is a program for a compiler, written by a client: a few kilobytes can keep that busy for
hours, fill the memory or overflow the stack. Here this ends the process, the grammar is
refused, and nobody else notices. The module knows grammars as text only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import resource
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import LifoQueue
from typing import TypeAlias

from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from replica.sampling.grammars import LIMITS
from serve_app.throttling.fair_work import FairWork

CPU_S = 1
"""Processor time for one grammar; up to a second more, since the system counts whole ones."""
WALL_S = 30.0
PROCESSES = 2
MAX_WAITING = 64
"""Grammars of one tenant that wait to be tried."""
MAX_VERDICTS = 8192
"""Verdicts that are kept."""
MAX_REASON = 100
"""Characters of why a grammar cannot be followed, of what the library says."""
MEMORY_BYTES = 2 << 30
STACK_BYTES = 1 << 20
"""An engine's threads have more: what compiles here does not overflow there."""
NICENESS = 10
"""Engines and event loops come first."""
MASK_CPU_S = 0.1
"""For what may come first, since a step of everybody's waits for it; schemas take 1 ms."""
BYTES = 262
"""Vocabulary of the tokenizer that grammars are tried with: every byte, and special tokens."""
SPECIAL = 257
"""One of these, to stand for those of other tokenizers."""

# The child sees the same packages as its parent, whatever made them importable there.
_BOOT = (
    "import os, sys; sys.path[:] = sys.argv.pop().split(os.pathsep); "
    "from serve_app.text.grammar_trial import main; main()"
)


class TooComplex(Exception):
    """A grammar takes more than the time, memory or stack that there is for it."""


Try: TypeAlias = Callable[[str], Awaitable[str]]
"""`GrammarTrial.error` of one tenant."""


class GrammarTrial:
    """Tries the grammars of all tenants, and knows those that it has tried. Used from one event
    loop."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        """max_waiting: grammars of one tenant."""
        self._work = FairWork("grammars", threads=PROCESSES, max_waiting=max_waiting)
        self._processes: LifoQueue[TrialProcess] = LifoQueue()
        for _ in range(PROCESSES):
            self._processes.put(TrialProcess())
        # The last one that was used comes first: it has started.
        self._verdicts: OrderedDict[bytes, asyncio.Future[str | None]] = OrderedDict()
        """By digest, those that are tried now among them; who was asked for last stands last."""

    async def error(self, tenant: str, grammar: str) -> str:
        """Why it cannot be followed, in the library's words; empty if it can. Raises TooComplex,
        and Refused for a tenant that has too much tried."""
        # What others have tried a tenant cannot find out.
        key = hashlib.sha256(f"{tenant}\0{grammar}".encode()).digest()
        verdict = self._verdicts.pop(key, None)
        if verdict is None:
            self._work.check(tenant)
            verdict = self._work.submit(tenant, partial(self._try, grammar))
            verdict.add_done_callback(partial(self._forget_failure, key))
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        try:
            error = await asyncio.shield(verdict)
        except TimeoutError:
            error = None
        if error is None:
            raise TooComplex
        return error

    def _forget_failure(self, key: bytes, verdict: asyncio.Future[str | None]) -> None:
        """A trial that did not take place is no verdict."""
        if verdict.cancelled() or verdict.exception() is not None:
            self._verdicts.pop(key, None)

    def _try(self, grammar: str) -> str | None:
        process = self._processes.get_nowait()
        try:
            return process.error(grammar)
        finally:
            self._processes.put(process)


class TrialProcess:
    """One process, started when it is needed and again when a grammar has ended it. Used by one
    thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def error(self, grammar: str) -> str | None:
        """What `compile_grammar` returns; None, too, if that ends the process. Raises TimeoutError,
        which may be the fault of a machine that is too busy."""
        if self._process is not None and self._process.poll() is not None:
            self._stop()  # somebody else ended it, between two grammars
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            answer = _read_line(process)
        except BrokenPipeError:
            answer = b""
        except TimeoutError:
            self._stop()
            raise
        if not answer:
            self._stop()
            self._start()  # in the time of who has ended it
            return None
        error: str | None = json.loads(answer)
        return error

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, os.pathsep.join(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._end = weakref.finalize(self, _kill, self._process)
        try:
            _read_line(self._process)  # it is ready
        except TimeoutError:
            self._stop()
            raise
        return self._process

    def _stop(self) -> None:
        self._end()
        self._process = None


def _read_line(process: subprocess.Popen[bytes]) -> bytes:
    """Empty if the process ends. Raises TimeoutError."""
    assert process.stdout is not None
    ends, line = time.monotonic() + WALL_S, b""
    while not line.endswith(b"\n"):
        left = max(0.0, ends - time.monotonic())
        ready, _, _ = select.select([process.stdout], [], [], left)
        if not ready:
            raise TimeoutError
        piece = process.stdout.read(1 << 16)
        if not piece:
            return b""
        line += piece
    return line


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes its pipes, and waits
        pass


def main() -> None:
    """The process: an empty line when it is ready; then a grammar per line, as a JSON string, and
    a line with the reason why it cannot be followed, or null."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    tokenizer = LLTokenizer("byte")
    print(flush=True)
    with ThreadPoolExecutor(1) as thread:
        for line in sys.stdin.buffer:
            _limit_processor_time()
            error = thread.submit(compile_grammar, tokenizer, json.loads(line)).result()
            sys.stdout.write(json.dumps(error and _reason(error)) + "\n")
            sys.stdout.flush()


def _limit_processor_time() -> None:
    """The system ends this process when it has used more from now on."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + CPU_S, most))


def _reason(error: str) -> str:
    """The library's reason, and not the rest of its words, which repeat all that was sent."""
    if found := re.search(r"Unimplemented keys: (\[.*\])", error):
        names = found[1].replace('"', "")[:MAX_REASON]
        return f"it uses keywords of JSON Schema that are not supported: {names}"
    marked = re.search(r"^error: (.+)$", error, re.MULTILINE)
    reason = marked[1] if marked else error.partition("\n")[0].rpartition("JSON schema: ")[2]
    reason = reason.strip() or "it cannot be followed"
    return reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "..."


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """What an engine does until the first token. What is wrong: nothing, if empty; None: it takes
    too long."""
    if error := LLMatcher.validate_grammar(grammar, limits=LIMITS):
        return error
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    started = time.thread_time()
    if not matcher.is_error():
        fill_next_token_bitmask(matcher, allocate_token_bitmask(1, BYTES))
    if time.thread_time() - started > MASK_CPU_S:
        return None
    error = matcher.get_error()
    return "it allows no text" if error.startswith("NoExtension") else error

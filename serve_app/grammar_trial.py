"""Tries grammars out in a process of their own, before an engine meets them.

A grammar is a program for a compiler, written by a client: a few kilobytes can keep that busy for
hours, fill the memory or overflow the stack. Here this ends the process, the grammar is
refused, and nobody else notices. The module knows grammars as text only.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from replica.grammars import LIMITS

CPU_S = 1
"""Processor time for one grammar; up to a second more, since the system counts whole ones."""
WALL_S = 30.0
MEMORY_BYTES = 2 << 30
STACK_BYTES = 1 << 20
"""An engine's threads have more: what compiles here does not overflow there."""
MASK_CPU_S = 0.1
"""For what may come first, since a step of everybody's waits for it; schemas take 1 ms."""
BYTES = 262
"""Vocabulary of the tokenizer that grammars are tried with: every byte, and special tokens."""
SPECIAL = 257
"""One of these, to stand for those of other tokenizers."""

# The child sees the same packages as its parent, whatever made them importable there.
_BOOT = (
    "import os, sys; sys.path[:] = sys.argv.pop().split(os.pathsep); "
    "from serve_app.grammar_trial import main; main()"
)


class TooComplex(Exception):
    """A grammar takes more than the time, memory or stack that there is for it."""


class GrammarTrial:
    """One process, started when it is needed and again when a grammar has ended it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammar-trial")
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    async def error(self, grammar: str) -> str:
        """Why it cannot be followed, in the library's words; empty if it can. Raises TooComplex."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._try, grammar)

    def _try(self, grammar: str) -> str:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # somebody else ended it, between two grammars
            self._process = None
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            answer = _read_line(process)
        except BrokenPipeError:
            answer = b""
        if not answer:
            self._process = None
            self._end()
            raise TooComplex
        error: str | None = json.loads(answer)
        if error is None:
            raise TooComplex
        return error

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, os.pathsep.join(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._end = weakref.finalize(self, _kill, self._process)
        return self._process


def _read_line(process: subprocess.Popen[bytes]) -> bytes:
    """Empty if the process ends or takes too long."""
    assert process.stdout is not None
    ends, line = time.monotonic() + WALL_S, b""
    while not line.endswith(b"\n"):
        left = max(0.0, ends - time.monotonic())
        ready, _, _ = select.select([process.stdout], [], [], left)
        piece = process.stdout.read(1 << 16) if ready else b""
        if not piece:
            return b""
        line += piece
    return line


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes its pipes, and waits
        pass


def main() -> None:
    """The process: a grammar per line, as a JSON string, and a line with its error, or null."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    tokenizer = LLTokenizer("byte")
    with ThreadPoolExecutor(1) as thread:
        for line in sys.stdin.buffer:
            _limit_processor_time()
            error = thread.submit(compile_grammar, tokenizer, json.loads(line)).result()
            sys.stdout.write(json.dumps(error) + "\n")
            sys.stdout.flush()


def _limit_processor_time() -> None:
    """The system ends this process when it has used more from now on."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + CPU_S, most))


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

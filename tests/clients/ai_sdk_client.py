"""Vercel's AI SDK, in a process of Node that node/client.mjs runs in."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from typing_extensions import Self

from tests.clients.client import Call, Client, Run, Target
from tests.clients.toolbox import BY_NAME, RESULT, Verdict

NODE = Path(__file__).with_name("node")


class AISDKError(Exception):
    """What the library has raised, in its words."""


class AISDKClient(Client):
    """provider: its package, "openai" or "compatible"."""

    def __init__(self, target: Target, retries: int = 0, provider: str = "openai") -> None:
        super().__init__(target, retries)
        self._provider = provider
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def agent(
        self, question: str, choices: Sequence[str], *, tools: int, stream: bool
    ) -> Run:
        told = await self._call("agent", question, choices, tools, stream)
        turns = [[Call(*call) for call in turn] for turn in told["turns"]]
        for call in (call for turn in turns for call in turn):
            BY_NAME[call.name].model_validate(call.arguments)
        return Run(turns, Verdict.model_validate(told["verdict"]), told["tokens"])

    async def decide(self, question: str) -> Verdict:
        return Verdict.model_validate(await self._call("decide", question))

    async def cut(self, question: str, limit: int, *, stream: bool) -> str:
        return str(await self._call("cut", question, limit, stream))

    async def ask(self, question: str, *, stream: bool) -> str:
        return str(await self._call("ask", question, stream))

    async def leave(self, question: str) -> None:
        await self._call("leave", question)

    async def show_image(self) -> str:
        return str(await self._call("show_image"))

    async def embed(self) -> None:
        await self._call("embed")

    async def respond(self) -> None:
        await self._call("respond")

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *("node", NODE / "client.mjs"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | self._environment(),
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._process.kill()
        await self._reading

    async def _call(self, method: str, *args: Any) -> Any:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        line = json.dumps({"id": number, "method": method, "args": args})
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        return await answer

    def _environment(self) -> dict[str, str]:
        return {
            "BASE_URL": self.target.base_url,
            "KEY": self.target.key,
            "MODEL": self.target.model,
            "RETRIES": str(self.retries),
            "PROVIDER": self._provider,
            "RESULT": RESULT,
        }

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            told = json.loads(line)
            answer = self._waiting.pop(told["id"])
            if "error" in told:
                answer.set_exception(AISDKError(told["error"]))
            else:
                answer.set_result(told["result"])
        for answer in self._waiting.values():
            answer.set_exception(AISDKError("its process has ended"))

"""OpenAI's own client: its helpers `parse` and `stream`, and a loop of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI, LengthFinishReasonError, pydantic_function_tool
from openai.types.chat import ChatCompletion, ParsedChatCompletion

from tests.clients.client import SYSTEM, Call, Client, Run, Target
from tests.clients.toolbox import RESULT, TOOLS, Verdict, Weather

SCHEMAS = [pydantic_function_tool(tool) for tool in TOOLS]
WEATHER = {"type": "function", "function": {"name": Weather.__name__}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


class OpenAIClient(Client):
    def __init__(self, target: Target, retries: int = 0) -> None:
        super().__init__(target, retries)
        self._client = AsyncOpenAI(
            base_url=target.base_url, api_key=target.key, max_retries=retries, timeout=300
        )

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def agent(
        self, question: str, choices: Sequence[str], *, tools: int, stream: bool
    ) -> Run:
        history, turns, tokens = _begin(question), [], 0
        for choice in choices:
            named = {"type": "function", "function": {"name": choice}}
            known = choice in ("auto", "required", "none")
            completion = await self._parsed(
                stream,
                messages=history,
                tools=SCHEMAS[:tools],
                tool_choice=choice if known else named,
                parallel_tool_calls=choice == "auto",
                response_format=Verdict,
                max_completion_tokens=200,
            )
            message = completion.choices[0].message
            assert completion.usage is not None
            tokens += completion.usage.completion_tokens
            if not message.tool_calls:
                assert completion.choices[0].finish_reason == "stop"
                assert message.parsed is not None
                return Run(turns, message.parsed, tokens)
            assert completion.choices[0].finish_reason == "tool_calls"
            turns.append([_call(call) for call in message.tool_calls])
            history += _answered(message)
        raise AssertionError("no verdict")

    async def decide(self, question: str) -> Verdict:
        asked = {"messages": _begin(question), "response_format": Verdict}
        verdict = (await self._parsed(True, **asked)).choices[0].message.parsed
        assert verdict is not None
        return verdict

    async def cut(self, question: str, limit: int, *, stream: bool) -> str:
        history = _begin(question)
        asked: dict[str, Any] = {
            "model": self.target.model,
            "messages": history,
            "tools": SCHEMAS[:2],
            "tool_choice": WEATHER,
            "max_tokens": limit,
        }
        message = (await self._maybe_cut(stream, asked)).choices[0].message
        history += [*_answered(message), {"role": "user", "content": "Go on."}]
        asked |= {"max_tokens": 3, "tool_choice": "none"}
        completion = await self._client.chat.completions.create(**asked)
        return completion.choices[0].message.content or ""

    async def _maybe_cut(self, stream: bool, asked: dict[str, Any]) -> ChatCompletion:
        """Strict tools promise whole arguments, so the client raises where they are cut."""
        try:
            if not stream:
                return await self._client.chat.completions.parse(**asked)
            async with self._client.chat.completions.stream(**asked) as events:
                return await events.get_final_completion()
        except LengthFinishReasonError as error:
            return error.completion

    async def ask(self, question: str, *, stream: bool) -> str:
        if not stream:
            return (await self._create(question)).choices[0].message.content or ""
        text = ""
        async for chunk in await self._create(question, stream=True):
            text += chunk.choices[0].delta.content or ""
        return text

    async def leave(self, question: str) -> None:
        async with await self._create(question, stream=True) as chunks:
            await anext(aiter(chunks))

    async def show_image(self) -> str:
        content = [{"type": "text", "text": "What is it?"}, IMAGE]
        return (await self._create(content)).choices[0].message.content or ""

    async def embed(self) -> None:
        await self._client.embeddings.create(model=self.target.model, input="Paris")

    async def respond(self) -> None:
        await self._client.responses.create(model=self.target.model, input="Paris")

    async def _create(self, content: Any, **options: Any) -> Any:
        turns = [{"role": "user", "content": content}]
        return await self._client.chat.completions.create(
            model=self.target.model, messages=turns, **options
        )

    async def _parsed(self, stream: bool, **asked: Any) -> ParsedChatCompletion[Verdict]:
        asked["model"] = self.target.model
        if not stream:
            return await self._client.chat.completions.parse(**asked)
        asked["stream_options"] = {"include_usage": True}
        async with self._client.chat.completions.stream(**asked) as events:
            return await events.get_final_completion()


def _begin(question: str) -> list[Any]:
    return [
        {"role": "developer", "content": SYSTEM},
        {"role": "user", "content": [{"type": "text", "text": question}], "name": "alice"},
    ]


def _call(call: Any) -> Call:
    parsed = call.function.parsed_arguments
    assert type(parsed).__name__ == call.function.name
    return Call(call.function.name, parsed.model_dump(exclude_unset=True))


def _answered(message: Any) -> list[Any]:
    """The message with all of its fields, as most programs send it back, and results."""
    sent = message.model_dump()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
        for call in sent.get("tool_calls") or ()
    ]
    return [sent, *results]

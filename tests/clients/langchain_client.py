"""LangChain: `ChatOpenAI` and the loop of `create_agent`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    AnyMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import BaseTool, StructuredTool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.clients.client import SYSTEM, Call, Client, Run
from tests.clients.toolbox import RESULT, TOOLS, Verdict, Weather


def _tool(schema: type[BaseModel]) -> BaseTool:
    def run(**arguments: Any) -> str:
        return RESULT

    return StructuredTool.from_function(
        run, name=schema.__name__, description=schema.__doc__, args_schema=schema
    )


class LangChainClient(Client):
    async def __aexit__(self, *error: object) -> None:
        """The library keeps one pool of connections for all its models of a process."""

    async def agent(
        self, question: str, choices: Sequence[str], *, tools: int, stream: bool
    ) -> Run:
        left = list(choices)

        @wrap_model_call
        async def choose(
            request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
        ) -> ModelResponse:
            return await handler(request.override(model_settings={"tool_choice": left.pop(0)}))

        agent: Any = create_agent(
            self._model(max_tokens=200, stream_usage=True),
            [_tool(schema) for schema in TOOLS[:tools]],
            system_prompt=SYSTEM,
            response_format=ProviderStrategy(Verdict),
            middleware=[choose],
        )
        asked = {"messages": [HumanMessage(question)]}
        if stream:
            parts = [
                part async for part in agent.astream(asked, stream_mode=["messages", "values"])
            ]
            assert sum(mode == "messages" for mode, _ in parts) > len(choices)
            state = parts[-1][1]
        else:
            state = await agent.ainvoke(asked)
        answers = [turn for turn in state["messages"] if isinstance(turn, AIMessage)]
        turns = [[Call(c["name"], c["args"]) for c in turn.tool_calls] for turn in answers]
        usage = [turn.usage_metadata for turn in answers if turn.usage_metadata]
        tokens = sum(counted["output_tokens"] for counted in usage)
        return Run(turns[:-1], state["structured_response"], tokens)

    async def decide(self, question: str) -> Verdict:
        """By a tool that has to be called; the agent's verdict is one by `response_format`."""
        model = self._model().with_structured_output(Verdict, method="function_calling")
        verdict = await model.ainvoke(question)
        assert isinstance(verdict, Verdict)
        return verdict

    async def cut(self, question: str, limit: int, *, stream: bool) -> str:
        model = self._model(max_tokens=limit)
        tools = [_tool(schema) for schema in TOOLS[:2]]
        bound = model.bind_tools(tools, tool_choice=Weather.__name__)
        turns: list[AnyMessage] = [SystemMessage(SYSTEM), HumanMessage(question)]
        if stream:
            answer: AIMessage = AIMessageChunk("")
            async for chunk in bound.astream(turns):
                answer = answer + chunk
        else:
            answer = await bound.ainvoke(turns)
        calls = [*answer.tool_calls, *answer.invalid_tool_calls]
        turns += [answer, *(ToolMessage(RESULT, tool_call_id=call["id"]) for call in calls)]
        turns += [HumanMessage("Go on.")]
        last = await self._model(max_tokens=3).bind_tools(tools, tool_choice="none").ainvoke(turns)
        return str(last.content)

    async def ask(self, question: str, *, stream: bool) -> str:
        if not stream:
            return str((await self._model().ainvoke(question)).content)
        return "".join([str(chunk.content) async for chunk in self._model().astream(question)])

    async def leave(self, question: str) -> None:
        chunks = self._model().astream(question)
        await anext(chunks)
        await chunks.aclose()

    async def show_image(self) -> str:
        image = {"type": "image", "base64": "iVBORw0KGgo=", "mime_type": "image/png"}
        content: list[Any] = [{"type": "text", "text": "What is it?"}, image]
        return str((await self._model().ainvoke([HumanMessage(content)])).content)

    async def embed(self) -> None:
        # Token ids of OpenAI's models are asked for otherwise.
        await OpenAIEmbeddings(**self._options(), check_embedding_ctx_length=False).aembed_query(
            "x"
        )

    async def respond(self) -> None:
        await self._model(use_responses_api=True).ainvoke("Paris")

    def _model(self, **options: Any) -> ChatOpenAI:
        return ChatOpenAI(**self._options(), timeout=300, **options)

    def _options(self) -> dict[str, Any]:
        target = self.target
        named = {"base_url": target.base_url, "api_key": target.key, "model": target.model}
        return {**named, "max_retries": self.retries}

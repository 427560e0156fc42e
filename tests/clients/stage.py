"""A model that plays a part, so that agents come through all their turns: what it says depends on
its prompt alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from serve_app.protocol.backend import Refused, ServedModel
from serve_app.text.call_forms import HERMES
from tests.clients.toolbox import RESULT
from tests.serve_app.text_backend import TextBackend

AGENT, CUT, STORY = "Play the agent.", "Play the call.", "Tell a story."
"""Questions that name a part. Whatever else is asked is repeated."""
PLACE = {"city": "Paris", "country": "FR"}
VERDICT = {"city": "Paris", "warm": True, "why": None}
TURNS: list[list[tuple[str, dict[str, Any]]]] = [
    [("Weather", {"place": PLACE, "unit": "celsius"})],
    [("Clock", {}), ("Timer", {"hours": 3})],
    [("Message", {"to": 'a"\\\n日', "urgent": False})],
    [("Convert", {"amount": 2.5, "currencies": ["EUR", "USD"]}), ("Clock", {})],
]
"""Of the agent; it gives its verdict in the fifth."""
SAID = [
    *(
        "\n".join(HERMES.written(name, json.dumps(arguments)) for name, arguments in turn)
        for turn in TURNS
    ),
    json.dumps(VERDICT),
]
"""The agent's turns as text."""
CALL = SAID[0]
MODEL = ServedModel("stage", 1, vocab_size=300, eos_token_ids=(256,), max_model_len=100_000)


@dataclass
class Stage(TextBackend):
    """Each refusal is for one request."""

    model_: ServedModel = MODEL
    refusals: list[Refused] = field(default_factory=list)

    def reset(self) -> None:
        vars(self).update(vars(Stage()))

    def _maybe_fail(self, number: int) -> None:
        if self.refusals and number == 0:
            raise self.refusals.pop()
        super()._maybe_fail(number)

    def _said(self, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(_play(bytes(prompt_ids).decode()).encode())


def _play(prompt: str) -> str:
    if AGENT in prompt:
        return _as_agent(prompt)
    if CUT in prompt:
        return "Yes" if "Go on." in prompt else CALL
    if STORY in prompt:
        return "Once upon a time. " * 1000
    return prompt


def _as_agent(prompt: str) -> str:
    """A turn has one result for each of its calls."""
    results = prompt.count(RESULT)
    turn = 0
    while results:
        results -= len(TURNS[turn])
        turn += 1
    return SAID[turn]

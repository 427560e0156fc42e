"""What every client library is asked to do, in its own way of doing it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import Self

from tests.clients.toolbox import Verdict

SYSTEM = "You are an agent."


@dataclass(frozen=True)
class Target:
    """A server, and the model that is asked."""

    base_url: str
    key: str
    model: str


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


class Run(NamedTuple):
    """What an agent did."""

    turns: list[list[Call]]
    """The calls of each answer but the last."""
    verdict: Verdict
    """The last one."""
    tokens: int
    """Of all answers, as the library has counted them."""


class Client(ABC):
    """One library. `retries` are its own, in all its calls."""

    def __init__(self, target: Target, retries: int = 0) -> None:
        self.target = target
        self.retries = retries

    async def __aenter__(self) -> Self:
        return self

    @abstractmethod
    async def __aexit__(self, *error: object) -> None:
        """Its connections are closed."""

    @abstractmethod
    async def agent(
        self, question: str, choices: Sequence[str], *, tools: int, stream: bool
    ) -> Run:
        """Ask with the first `tools` of the toolbox, give the results back, and so on until there
        is a verdict, which is asked for by a schema all the while. choices: of tools, for each
        turn; the name of one is among them."""

    @abstractmethod
    async def decide(self, question: str) -> Verdict:
        """The answer as an object, in the way that the library has for that."""

    @abstractmethod
    async def cut(self, question: str, limit: int, *, stream: bool) -> str:
        """A call of the tool Weather that ends after `limit` tokens, sent back as it came, with
        results for what it has of calls. Returns the text of the answer to that, at most three
        tokens long."""

    @abstractmethod
    async def ask(self, question: str, *, stream: bool) -> str:
        """The text of an answer."""

    @abstractmethod
    async def leave(self, question: str) -> None:
        """Hang up when a stream has begun."""

    @abstractmethod
    async def show_image(self) -> str:
        """Ask about an image."""

    @abstractmethod
    async def embed(self) -> None:
        """Ask for an embedding."""

    @abstractmethod
    async def respond(self) -> None:
        """Ask the newer endpoint of OpenAI, which some libraries take by default."""

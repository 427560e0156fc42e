"""The tools of an agent, as many and as deep as agents have them, and what the last turn is to say.

Every argument is bounded, since the small model that picks them would go on for ever.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

City = Literal["Paris", "London", "Rome"]
Hours = Annotated[int, Field(ge=1, le=48)]


class Place(BaseModel):
    city: City
    country: Literal["FR", "UK", "IT"] | None = None


class Weather(BaseModel):
    """The weather in a place."""

    place: Place = Field(description="Where")
    unit: Literal["celsius", "fahrenheit"] = "celsius"


class Clock(BaseModel):
    """The time now."""


class Flights(BaseModel):
    """Flights between two places."""

    origin: Place
    target: Place
    seats: Annotated[int, Field(ge=1, le=9)] = 1


class Convert(BaseModel):
    """Converts an amount of money."""

    amount: Annotated[float, Field(ge=0, le=1000)]
    currencies: Annotated[list[Literal["EUR", "GBP", "USD"]], Field(min_length=2, max_length=2)]


class Remind(BaseModel):
    """Reminds the user of something."""

    about: Literal["tea", "train", "call"]
    hours: Hours


class Events(BaseModel):
    """The events of a day."""

    day: Literal["today", "tomorrow"]
    kinds: Annotated[list[Literal["work", "home"]], Field(max_length=2)] = []


class Message(BaseModel):
    """Sends a message."""

    to: Annotated[str, Field(max_length=8)]
    urgent: bool


class Notes(BaseModel):
    """Finds notes."""

    words: Annotated[str, Field(max_length=8)]
    newest: bool | None = None


class Translate(BaseModel):
    """Translates a word."""

    word: Annotated[str, Field(max_length=8)]
    language: Literal["fr", "it"]


class Hotel(BaseModel):
    """Books a hotel."""

    place: Place
    nights: Annotated[int, Field(ge=1, le=9)]


class Timer(BaseModel):
    """Starts a timer."""

    hours: Hours


class Rate(BaseModel):
    """Rates the answer."""

    stars: Literal[1, 2, 3, 4, 5]


TOOLS: tuple[type[BaseModel], ...] = (
    *(Weather, Clock, Flights, Convert, Remind, Events),
    *(Message, Notes, Translate, Hotel, Timer, Rate),
)
BY_NAME = {tool.__name__: tool for tool in TOOLS}
RESULT = '{"degrees": 24, "sky": "clear"}'
"""What every tool gives."""


class Verdict(BaseModel):
    """What the agent is to find out."""

    city: City
    warm: bool
    why: Literal["weather", "season"] | None = None

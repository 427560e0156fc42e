"""A conversation as a chat template takes it.

Templates differ in what they take: `TemplateProfile` says how, and is found by trying
(`serve_app.text.templates`). The module renders nothing and knows no particular template.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, Literal, TypeAlias

from serve_app.protocol.conversation import CalledFunction, Function, Message
from serve_app.text.call_forms import HERMES, CallForm, instructions

Turn: TypeAlias = "dict[str, Any]"
System: TypeAlias = Literal["turns", "front", "first", "last"]

NINE = re.compile("[a-zA-Z0-9]{9}")
ALPHANUMERICS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
GAP = "\n\n"
"""Between texts that share a turn."""


class NotTaken(Exception):
    """A conversation that a template cannot write, and why."""


@dataclass(frozen=True)
class TemplateProfile:
    """What a conversation has to look like. The defaults are what most templates take."""

    alone: bool = False
    """It is one message of the user: all else would be left out."""
    parts: bool = False
    """Content is a list of parts, not a text."""
    system: System = "turns"
    """Where what the system says goes: in turns of its own, in one turn in front, or in the first
    or last turn of the user."""
    alternates: bool = False
    """Two turns of one role must not follow each other: they are joined."""
    tools: str | None = None
    """The template's variable for tools; without one a system message describes them."""
    calls: bool = False
    """Calls are fields of a turn; else they are text."""
    results: bool = True
    """Results have a role of their own; else the user tells them."""
    nine: bool = False
    """Ids of calls are nine letters or digits."""
    arguments: Literal["object", "text"] = "object"
    raw_arguments: bool = True
    """Arguments that are no JSON object, such as those of a call that was cut, are passed on."""
    single: bool = False
    """One call in a turn: each is followed by its result."""
    beside: Literal["same", "before", "dropped"] = "same"
    """Where the text goes that stands beside calls: in the same turn or in one before; dropped if
    the template takes neither."""
    form: CallForm = HERMES


def described(tool: Function) -> Mapping[str, Any]:
    """A tool as templates expect it."""
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": {"type": "object", "properties": {}, **(tool.parameters or {})},
    }
    return {"type": "function", "function": function}


def turns_of(
    messages: Sequence[Message], tools: Sequence[Function], profile: TemplateProfile
) -> list[Turn]:
    """The conversation for a template of this profile. Raises NotTaken."""
    if profile.alone and (tools or len(messages) > 1 or messages[0].role != "user"):
        raise NotTaken("it takes a single message of the user")
    turns: Iterable[Turn] = _with_ids(messages)
    if profile.single:
        turns = _one_call_each(list(turns))
    turns = [written for turn in turns for written in _written(turn, profile)]
    if tools and profile.tools is None:
        turns = _with_system(turns, instructions([described(tool) for tool in tools]))
    if profile.system != "turns":
        turns = _with_system_at(list(turns), profile.system)
    if profile.alternates:
        turns = _joined(turns)
    return [_in_parts(turn) for turn in turns] if profile.parts else list(turns)


def _with_ids(messages: Sequence[Message]) -> Iterator[Turn]:
    """Turns whose calls have ids and whose results name their call: some clients leave that out."""
    waiting: dict[str, str] = {}
    """Name of the function of each call without a result, by id."""
    count = 0
    for message in messages:
        turn: Turn = {"role": _role(message.role), "content": message.content}
        if message.name is not None:
            turn["name"] = message.name
        if thoughts := message.reasoning_content or message.reasoning:
            turn["reasoning_content"] = thoughts
        if message.tool_calls:
            turn["tool_calls"] = calls = []
            for call in message.tool_calls:
                count += 1
                id_ = call.id or f"call_{count}"
                calls.append({"type": "function", "id": id_, "function": call.function})
                waiting[id_] = call.function.name
        if message.role == "tool":
            answered = message.tool_call_id or next(iter(waiting), "")
            turn["tool_call_id"] = answered
            if name := waiting.pop(answered, None):
                turn.setdefault("name", name)
        yield turn


def _role(role: str) -> str:
    """Templates know the older name of a developer message."""
    return "system" if role == "developer" else role


def _one_call_each(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Several calls as turns of their own, each followed by its result if there is one."""
    place = 0
    while place < len(turns):
        turn = turns[place]
        place += 1
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:
            yield turn
            continue
        results = list(takewhile(lambda other: other["role"] == "tool", turns[place:]))
        place += len(results)
        by_id: defaultdict[str, list[Turn]] = defaultdict(list)
        for result in results:
            by_id[result["tool_call_id"]].append(result)
        for number, call in enumerate(calls):
            content = "" if number else turn["content"]
            yield {**turn, "content": content, "tool_calls": [call]}
            yield from by_id.pop(call["id"], ())
        yield from chain.from_iterable(by_id.values())  # of calls that nobody has made


def _written(turn: Turn, profile: TemplateProfile) -> Iterator[Turn]:
    """A turn with its calls or its result in the form that the template takes."""
    if turn["role"] == "tool" and not profile.results:
        yield {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
        return
    if profile.nine and "tool_call_id" in turn:
        turn = {**turn, "tool_call_id": _nine(turn["tool_call_id"])}
    calls = turn.get("tool_calls")
    if calls is None:
        yield turn
    elif not profile.calls:
        texts = [_text_of(call["function"], profile.form) for call in calls]
        content = "\n".join(filter(None, [turn["content"], *texts]))
        yield {name: turn[name] for name in turn if name != "tool_calls"} | {"content": content}
    else:
        if turn["content"] and profile.beside == "before":
            yield {name: turn[name] for name in turn if name != "tool_calls"}
        content = turn["content"] if profile.beside == "same" else ""
        made = [_native(call, profile) for call in calls]
        yield turn | {"content": content, "tool_calls": made}


def _text_of(called: CalledFunction, form: CallForm) -> str:
    arguments = called.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return form.written(called.name, arguments)


def _native(call: Turn, profile: TemplateProfile) -> Turn:
    called: CalledFunction = call["function"]
    arguments = called.arguments
    if isinstance(arguments, str):
        arguments = arguments if profile.raw_arguments else {}
    if profile.arguments == "text" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    id_ = _nine(call["id"]) if profile.nine else call["id"]
    return call | {"id": id_, "function": {"name": called.name, "arguments": arguments}}


def _nine(id_: str) -> str:
    """Nine letters or digits that stand for an id: the same ones whenever it comes."""
    if NINE.fullmatch(id_):
        return id_
    number = int.from_bytes(hashlib.sha256(id_.encode("utf-8", "surrogatepass")).digest()[:8])
    return "".join(ALPHANUMERICS[number // 62**place % 62] for place in range(9))


def _with_system(turns: Iterable[Turn], text: str) -> Iterator[Turn]:
    """A further instruction, behind those of the client."""
    turns = iter(turns)
    first = next(turns, None)
    if first is not None and first["role"] == "system":
        yield first | {"content": first["content"] + GAP + text}
    else:
        yield {"role": "system", "content": text}
        if first is not None:
            yield first
    yield from turns


def _with_system_at(turns: Sequence[Turn], place: System) -> list[Turn]:
    """All that the system says in one turn: of its own, or at the head of a user's."""
    texts = [turn["content"] for turn in turns if turn["role"] == "system"]
    others = [turn for turn in turns if turn["role"] != "system"]
    if not texts:
        return others
    users = [number for number, turn in enumerate(others) if turn["role"] == "user"]
    if place == "front" or not users or (place == "first" and users[0] > 0):
        role = "system" if place == "front" else "user"
        return [{"role": role, "content": GAP.join(texts)}, *others]
    number = users[0] if place == "first" else users[-1]
    content = GAP.join([*texts, others[number]["content"]])
    return [*others[:number], others[number] | {"content": content}, *others[number + 1 :]]


def _joined(turns: Iterable[Turn]) -> list[Turn]:
    """Neighbours of one role as one turn; calls and results stay by themselves."""
    groups: list[list[Turn]] = []
    for turn in turns:
        if groups and _shares_turn(groups[-1][0], turn):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return [group[0] | {"content": GAP.join(one["content"] for one in group)} for group in groups]


def _shares_turn(one: Turn, other: Turn) -> bool:
    if "tool_calls" in one or "tool_calls" in other:
        return False
    return bool(one["role"] == other["role"] != "tool")


def _in_parts(turn: Turn) -> Turn:
    return turn | {"content": [{"type": "text", "text": turn["content"]}]}

"""What a model's chat template takes, found by trying when the server starts.

A template is a program of the model's authors. What it cannot take it refuses or, worse, leaves
out. So a whole conversation is written with it, made of words that are looked for in the result,
in one way after the other until nothing is missing. The module knows no particular template.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, TypeAlias

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from serve_app.protocol.conversation import Function, Message
from serve_app.text.call_forms import HERMES, CallForm, form_in
from serve_app.text.turns import NotTaken, System, TemplateProfile, Turn, described, turns_of

Render: TypeAlias = Callable[[Sequence[Turn], Mapping[str, Any]], str]

logger = logging.getLogger(__name__)

MAX_REASON = 200
"""Characters that are told of why a template refuses."""
VARIABLES = ("tools", "xml_tools")
"""By which templates take tools."""


class ChatTemplate:
    """One template of a tokenizer. Raises ValueError, with a sentence, for one that leaves out what
    is said however it is put."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, source: str) -> None:
        self._tokenizer = tokenizer
        self._source = source
        profile = profile_of(self.render)
        special = _special_pieces(profile.form, tokenizer.backend_tokenizer)
        self.profile = replace(profile, form=replace(profile.form, special=special))

    def render(self, turns: Sequence[Turn], variables: Mapping[str, Any]) -> str:
        """The text up to where the answer begins. Raises whatever the template raises."""
        text: Any = self._tokenizer.apply_chat_template(
            list(turns),
            chat_template=self._source,
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )
        return str(text)


def templates_of(
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[ChatTemplate, ChatTemplate] | None:
    """Templates for conversations without and with tools; None if the tokenizer has none.

    Raises ValueError if none of several is the default, or if one of these two cannot be used.
    """
    given = tokenizer.chat_template
    if not given:
        return None
    if isinstance(given, str):
        given = {"default": given}
    plain = given.get("default", next(iter(given.values())) if len(given) == 1 else None)
    if plain is None:
        names = ", ".join(sorted(given))
        raise ValueError(f"The tokenizer has chat templates named {names}, and no default one.")
    with_tools = given.get("tool_use", plain)
    first = ChatTemplate(tokenizer, plain)
    return first, first if with_tools == plain else ChatTemplate(tokenizer, with_tools)


def told(error: Exception) -> str:
    """What a template says of why it refuses a conversation; empty if it fails otherwise."""
    says = isinstance(error, NotTaken) or type(error) is TemplateError
    return " ".join(str(error).split()) if says else ""


def _special_pieces(form: CallForm, tokenizer: Tokenizer) -> tuple[tuple[str, int], ...]:
    """Special tokens that the form is written with."""
    text = form.mark + form.open + form.head + form.middle + form.end + form.between + form.close
    added = tokenizer.get_added_tokens_decoder().items()
    return tuple((one.content, id_) for id_, one in added if one.special and one.content in text)


@dataclass(frozen=True)
class _Case:
    """A conversation, and what has to be found in its text."""

    turns: tuple[dict[str, Any], ...]
    words: tuple[str, ...]
    offers: bool = False
    """The conversation offers a tool."""

    @property
    def messages(self) -> list[Message]:
        return [Message.model_validate(turn) for turn in self.turns]

    def without(self, word: str) -> _Case:
        """The word may be missing."""
        return replace(self, words=tuple(other for other in self.words if other != word))


def _call(number: int, arguments: str) -> dict[str, Any]:
    """With an id as answers of this server have it."""
    function = {"name": NAME, "arguments": arguments}
    return {"id": f"call_{number:032x}", "type": "function", "function": function}


def _result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number:032x}", "content": content}


NAME = "zqfunction"
TOOL = Function(
    name=NAME,
    description="zqdescription",
    parameters={
        "type": "object",
        "properties": {"zqfield": {"type": "string", "description": "zqmeaning"}},
        "required": ["zqfield"],
    },
)
ARGUMENTS = [{"zqkey": "zqone"}, {"zqkey": "zqtwo"}]
BESIDE = "zqbeside"
CUT = '{"zqkey": "zqcut'

_SYSTEM = {"role": "system", "content": "zqsystem"}
_LATER = {"role": "system", "content": "zqlater"}
_USER = {"role": "user", "content": "zquser"}
_AGAIN = {"role": "user", "content": "zqagain"}
_ANSWER = {"role": "assistant", "content": "zqanswer"}
_CALLS = {
    "role": "assistant",
    "content": BESIDE,
    "tool_calls": [_call(number, json.dumps(one)) for number, one in enumerate(ARGUMENTS)],
}
_ONE_CALL = {"role": "assistant", "content": None, "tool_calls": _CALLS["tool_calls"][:1]}
_CUT = {"role": "assistant", "content": None, "tool_calls": [_call(0, CUT)]}
_RESULTS = (_result(0, "zqfirst"), _result(1, "zqsecond"))

NAMES = {
    "system": "what the system says",
    "user": "what the user says",
    "answer": "earlier answers",
    "later": "what the system says later",
    "again": "what the user says then",
}
"""What is missing, in words."""
ALONE = _Case((_USER,), ("zquser",))
PLAIN = _Case(
    (_SYSTEM, _USER, _ANSWER, _LATER, _AGAIN),
    ("zqsystem", "zquser", "zqanswer", "zqlater", "zqagain"),
)
TWICE = _Case((_SYSTEM, _USER, _AGAIN), ("zqsystem", "zquser", "zqagain"))
OFFERED = _Case((_SYSTEM, _USER), ("zqsystem", "zquser", NAME, "zqdescription"), offers=True)
CALLED = _Case(
    (_SYSTEM, _USER, _CALLS, *_RESULTS),
    ("zqsystem", "zquser", BESIDE, NAME, "zqkey", "zqone", "zqtwo", "zqfirst", "zqsecond"),
    offers=True,
)
AFTER = replace(
    CALLED,
    turns=(*CALLED.turns, _ANSWER, _AGAIN),
    words=(*CALLED.words, "zqanswer", "zqagain"),
)
SILENT = _Case((_USER, _ONE_CALL, _RESULTS[0]), ("zquser", "zqone", "zqfirst"), offers=True)
SPOILED = _Case((_USER, _CUT, _RESULTS[0]), ("zquser", "zqcut", "zqfirst"), offers=True)


def profile_of(render: Render) -> TemplateProfile:
    """How conversations have to be put to a template. Raises ValueError if there is no way."""
    profile = _plain(render)
    if profile.alone:
        return profile
    profile = replace(profile, tools=_tools_variable(render, profile))
    calls = profile.tools is not None and _with_calls(render, profile)
    profile = calls or _with_calls_as_text(render, profile)
    changed = [
        f"{field.name}={value!r}"
        for field in fields(profile)
        if field.name != "form" and (value := getattr(profile, field.name)) != field.default
    ]
    logger.info("the chat template takes %s", ", ".join(changed) or "the usual")
    if profile.beside == "dropped":
        logger.warning("the chat template leaves out the text that stands beside calls of tools")
    return profile


def _plain(render: Render) -> TemplateProfile:
    """Without tools."""
    systems = _system_places(render)
    candidates = [
        TemplateProfile(parts=parts, alternates=alternates, system=system)
        for parts, alternates, system in product((False, True), (False, True), systems)
    ]
    if found := next((one for one in candidates if _fits(render, one, PLAIN, TWICE)), None):
        text = _text(render, found, ALONE)
        if text is None or "zquser" in text:
            return found
    single = (TemplateProfile(alone=True, parts=parts) for parts in (False, True))
    fault = f"the chat template {_fault(render)}"
    if found := next((one for one in single if _fits(render, one, ALONE)), None):
        logger.warning("%s: it is used for single messages of users only", fault)
        return found
    raise ValueError(f"{fault[0].upper()}{fault[1:]}: it cannot be used.")


def _system_places(render: Render) -> tuple[System, ...]:
    """In the order in which they are tried: a template may have put it into the last turn of the
    user by itself."""
    text = _text(render, TemplateProfile(system="front"), PLAIN) or ""
    late = 0 <= text.find("zquser") < text.find("zqsystem")
    return ("turns", "front", "last", "first") if late else ("turns", "front", "first", "last")


def _fault(render: Render) -> str:
    for case in (ALONE, PLAIN):
        profile = TemplateProfile()
        try:
            text = _rendered(render, profile, case)
        except Exception as error:
            reason = told(error)[:MAX_REASON] or type(error).__name__
            return f"refuses a conversation ({reason})"
        missing = [word.removeprefix("zq") for word in case.words if word not in text]
        if missing:
            return "leaves out " + ", ".join(NAMES[word] for word in missing)
    return "refuses or leaves out parts of a conversation"


def _tools_variable(render: Render, profile: TemplateProfile) -> str | None:
    candidates = (replace(profile, tools=variable) for variable in VARIABLES)
    return next((one.tools for one in candidates if _fits(render, one, OFFERED)), None)


def _with_calls(render: Render, profile: TemplateProfile) -> TemplateProfile | None:
    """The template writes calls and results. None if it does not, however they are put."""
    systems = _system_places(render)
    systems = systems[systems.index(profile.system) :]
    found = next(filter(lambda one: _takes_calls(render, one), _ways(profile, systems)), None)
    if found is None:
        return None
    text = _text(render, found, CALLED) or ""
    form = form_in(text, NAME, json.dumps(ARGUMENTS[0])) or HERMES
    return replace(
        found,
        form=replace(form, single=form.single or found.single),
        raw_arguments=_fits(render, found, SPOILED),
    )


def _ways(profile: TemplateProfile, systems: Sequence[System]) -> Iterator[TemplateProfile]:
    """To put calls; the first ones change the least."""
    both = (False, True)
    besides: Any = ("same", "before", "dropped")
    styles: Any = ("object", "text")
    for beside, system, arguments, single, nine in product(besides, systems, styles, both, both):
        yield replace(
            profile,
            calls=True,
            beside=beside,
            system=system,
            arguments=arguments,
            single=single,
            nine=nine,
        )


def _takes_calls(render: Render, profile: TemplateProfile) -> bool:
    cases = (CALLED, AFTER, SILENT)
    if profile.beside == "dropped":
        cases = (CALLED.without(BESIDE), AFTER.without(BESIDE), SILENT)
    return _fits(render, profile, *cases)


def _with_calls_as_text(render: Render, profile: TemplateProfile) -> TemplateProfile:
    ways = product((profile.alternates, True), (True, False))
    candidates = [replace(profile, alternates=joined, results=role) for joined, role in ways]
    found = next((one for one in candidates if _fits(render, one, CALLED, AFTER, SILENT)), None)
    if found is None:
        raise ValueError("The chat template cannot be used: it takes no results of tools.")
    return found


def _fits(render: Render, profile: TemplateProfile, *cases: _Case) -> bool:
    """Nothing is missing, and objects are written as JSON."""
    for case in cases:
        text = _text(render, profile, case)
        if text is None or not all(word in text for word in case.words):
            return False
        if any(repr(one) in text for one in ARGUMENTS):
            return False
    return True


def _text(render: Render, profile: TemplateProfile, case: _Case) -> str | None:
    """None if the template refuses it: it is a program, and raises whatever it likes."""
    try:
        return _rendered(render, profile, case)
    except Exception:
        return None


def _rendered(render: Render, profile: TemplateProfile, case: _Case) -> str:
    tools = [TOOL] if case.offers else []
    turns = turns_of(case.messages, tools, profile)
    return render(turns, variables_of(tools, profile))


def variables_of(tools: Sequence[Function], profile: TemplateProfile) -> dict[str, Any]:
    """Variables for the template: the tools, if there are any and it knows them."""
    if not tools or profile.tools is None:
        return {}
    return {profile.tools: [described(tool) for tool in tools]}

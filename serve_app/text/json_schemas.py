"""JSON schemas before a grammar is made of them: what constrains nothing is left out.

The module knows neither requests nor grammars, only which keywords hold schemas and what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = "dict[str, Any]"

SCHEMAS = frozenset(
    (
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
"""Keywords whose value is a schema, or a list of them."""
LISTS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems"])
MAPS = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
"""Keywords whose value has schemas by name."""
ANNOTATIONS = frozenset(
    (
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "readOnly",
        "title",
        "writeOnly",
        "xml",
    )
)
"""They say something about a value, and not which values there are."""
FORMATS = frozenset(
    (
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    )
)
"""Those that a grammar can follow. A format is an annotation unless somebody follows it."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
"""Keywords, and values of them that allow everything."""
FINE_PRINT = frozenset(
    (
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "maximum",
        "minimum",
        "multipleOf",
        "pattern",
        "patternProperties",
    )
)
"""Keywords that a compiler may refuse for their value."""


def without_annotations(schema: Mapping[str, Any]) -> Schema:
    """A schema of the same values."""
    return _changed(schema, _plain)


def without_fine_print(schema: Mapping[str, Any]) -> Schema:
    """A schema of the same shape with fewer constraints."""
    return _changed(schema, _coarse)


def _changed(schema: Mapping[str, Any], change: Callable[[Schema], Schema]) -> Schema:
    """Each schema within this one by itself, and then this one."""
    return change({key: _value(key, value, change) for key, value in schema.items()})


def _value(key: str, value: Any, change: Callable[[Schema], Schema]) -> Any:
    """What is data and no schema stays: a default, or what an enumeration lists."""
    if key in MAPS and isinstance(value, Mapping):
        return {name: _of_schema(one, change) for name, one in value.items()}
    if key in SCHEMAS | LISTS and isinstance(value, list):
        return [_of_schema(one, change) for one in value]
    return _of_schema(value, change) if key in SCHEMAS else value


def _of_schema(value: Any, change: Callable[[Schema], Schema]) -> Any:
    return _changed(value, change) if isinstance(value, Mapping) else value


def _plain(schema: Schema) -> Schema:
    kept = {
        key: value
        for key, value in schema.items()
        if key not in ANNOTATIONS and not key.startswith("x-") and not _is_neutral(key, value)
    }
    if kept.get("format", "unknown") not in FORMATS:
        del kept["format"]
    return kept


def _is_neutral(key: str, value: Any) -> bool:
    return any(value == one and type(value) is type(one) for one in NEUTRAL.get(key, ()))


def _coarse(schema: Schema) -> Schema:
    kept = {key: value for key, value in schema.items() if key not in FINE_PRINT}
    if "patternProperties" in schema:  # what these allowed is not among the named ones
        kept.pop("additionalProperties", None)
    return kept

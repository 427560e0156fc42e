from __future__ import annotations

from typing import Any

import pytest

from serve_app.text.json_schemas import without_annotations, without_fine_print

STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        ({**STRING, "title": "t", "description": "d", "x-order": 1, "example": "e"}, STRING),
        ({**STRING, "examples": ["e"], "default": "d", "$comment": "c"}, STRING),
        ({**STRING, "deprecated": True, "readOnly": True, "writeOnly": False}, STRING),
        ({**STRING, "contentEncoding": "base64", "contentMediaType": "image/png"}, STRING),
        ({**STRING, "contentSchema": {"not": {}}}, STRING),
        ({**STRING, "format": "uri-reference"}, STRING),
        ({**STRING, "format": 1}, STRING),
        ({**STRING, "format": "date"}, {**STRING, "format": "date"}),
        ({"propertyNames": STRING}, {}),
        ({"propertyNames": {**STRING, "title": "name"}}, {}),
        ({"propertyNames": {"pattern": "^a"}}, {"propertyNames": {"pattern": "^a"}}),
        ({"uniqueItems": False}, {}),
        ({"uniqueItems": True}, {"uniqueItems": True}),
        ({"unevaluatedProperties": {}}, {}),
        ({"unevaluatedProperties": False}, {"unevaluatedProperties": False}),
        ({"if": {}, "then": STRING}, {"if": {}, "then": STRING}),
    ],
)
def test_what_constrains_nothing_is_left_out_wherever_there_is_a_schema(
    schema: Any, left: Any
) -> None:
    assert without_annotations(schema) == left
    for key in ("additionalProperties", "items", "not", "contains"):
        assert without_annotations({key: schema}) == {key: left}
    for key in ("anyOf", "allOf", "oneOf", "prefixItems", "items"):
        assert without_annotations({key: [True, schema]}) == {key: [True, left]}
    for key in ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas"):
        assert without_annotations({key: {"title": schema}}) == {key: {"title": left}}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"title": STRING, "description": True, "default": STRING, "format": STRING}},
        {"required": ["title", "examples"]},
        {"const": {"title": "t", "format": "x"}},
        {"enum": [{"description": "d"}, "title"]},
        {"dependentRequired": {"title": ["default"]}},
        {"items": True, "additionalProperties": False, "properties": 1, "anyOf": "odd"},
    ],
)
def test_names_and_data_are_no_keywords(schema: Any) -> None:
    assert without_annotations(schema) == schema


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        ({**STRING, "pattern": "^(?!x)", "minLength": 2}, {**STRING, "minLength": 2}),
        ({"type": "number", "minimum": -3.4e38, "exclusiveMaximum": 3.4e38}, {"type": "number"}),
        ({"patternProperties": {"(?!x)": STRING}, "additionalProperties": False}, {}),
        ({"enum": ["pattern"], "properties": {"format": STRING}},) * 2,
    ],
)
def test_the_fine_print_is_what_a_compiler_may_refuse(schema: Any, left: Any) -> None:
    assert without_fine_print(schema) == left
    assert without_fine_print({"properties": {"a": schema}}) == {"properties": {"a": left}}

"""The OpenAPI document of our own routes, from the models that check requests.

The module does not know what a request does.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_app.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""What each route that takes a body checks it against."""
PREFIX = "#/components/schemas/"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(app: FastAPI, version: str) -> dict[str, Any]:
    """The whole document, as JSON would hold it."""
    made = get_openapi(title="fairstream", version=version, routes=app.routes)
    pairs, schemas = models_json_schema(
        [(model, "validation") for model in BODIES.values()], ref_template=PREFIX + "{model}"
    )
    made["components"] = {
        "schemas": {**schemas.get("$defs", {}), "Error": ERROR},
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    made["security"] = [{"key": []}]
    failure = {"description": "An error", "content": _json({"$ref": PREFIX + "Error"})}
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation["responses"] = {
                "200": {"description": "Success", "content": _answers(path)},
                "4XX": failure,
                "5XX": failure,
            }
            if path in BODIES:
                schema = pairs[BODIES[path], "validation"]
                operation["requestBody"] = {"required": True, "content": _json(schema)}
    return made


def _answers(path: str) -> dict[str, Any]:
    content = _json({"type": "object"})
    if path.startswith("/v1/") and path in BODIES:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}

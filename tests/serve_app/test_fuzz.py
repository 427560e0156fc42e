"""Any JSON in any field: an answer or a clear 4xx, never a 5xx, and nothing is left running.

The long form is a run of schemathesis against a server: README has the command.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.http.openapi import BODIES, ERROR
from tests.serve_app.asking import chat, text
from tests.serve_app.conftest import Site

HOSTILE = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 10**30, -(2**63), 2**64),
    *("", "a", "auto", "none", "required", "json_object", "\u0000", "日本", "((", "x" * 5000),
    *("[" * 3000, [], [[]], [""], [0], [[1], [2]], {}, {"": ""}, {"1": 1}),
    *({"type": "function"}, {"type": "object"}, {"type": "json_schema"}),
    {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"type": "x"}}}},
    [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
    [{"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "", "arguments": ""}}]}],
]
VALUES = st.sampled_from(HOSTILE) | st.recursive(
    st.sampled_from(HOSTILE) | st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "name", "text", "role", "content", "a"]), inner)
    ),
    max_leaves=6,
)
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(max_tokens=3),
    "/v1/completions": text(max_tokens=3),
    "/tokenize": text(),
    "/detokenize": {"model": "text", "tokens": [1, 2]},
}


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """A good one with a few fields replaced."""
    names = [*BODIES[path].model_fields, "unheard_of"]
    changes = st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3)
    return changes.map(lambda fields: GOOD[path] | fields)


@pytest.mark.parametrize("path", GOOD)
def test_nothing_is_a_server_error(http: httpx.Client, site: Site, path: str) -> None:
    """C22, C23, C26, C28."""

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies(path))
    def check(body: dict[str, Any]) -> None:
        reply = http.post(path, json=body)
        if reply.status_code != 200:
            assert reply.status_code in (400, 404), (reply.status_code, body)
            assert len(reply.content) <= 4096
            jsonschema.validate(reply.json(), ERROR)
        elif not body.get("stream"):
            json.loads(reply.content)

    check()
    site.wait_until_idle()

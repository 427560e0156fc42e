"""Writes the reference of all settings from the settings themselves:

python -m serve_app.checks.reference > docs/configuration.md
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from replica.config import EngineConfig
from router.policy import FairPolicy
from router.pricing import Prices
from router.tenant import Slo, Tenant
from serve_app.protocol.limits import Limits
from serve_app.scaling.types import ScalingLimits
from serve_app.settings import AppConfig, Autoscaling, ModelConfig
from serve_app.text.reasoning import ReasoningTags

LINKS = {
    "ModelConfig": "a-model",
    "EngineConfig": "an-engine",
    "ReasoningTags": "tags-of-reasoning",
    "Autoscaling": "the-number-of-replicas",
    "FairPolicy": "fairness",
    "Limits": "the-api",
    "Prices": "prices",
    "Tenant": "a-tenant",
    "Slo": "what-a-tenant-was-promised",
}
BOUNDS_OF_SERVE = ("min_replicas", "max_replicas")
"""Of the policy: it is told those of the deployment."""
UNBOUNDED = 2**53

PARTS: list[tuple[str, str, type]] = [
    ("The application", "`args` of an application in a Serve configuration file", AppConfig),
    ("A model", "each of `models`", ModelConfig),
    ("An engine", "`engine`", EngineConfig),
    ("Tags of reasoning", "`reasoning`", ReasoningTags),
    ("The number of replicas", "`autoscaling`", Autoscaling),
    ("How replicas follow the load", "`policy_kwargs` of `autoscaling_policy`", ScalingLimits),
    ("Fairness", "`fairness`", FairPolicy),
    ("The API", "`api`", Limits),
    ("Prices", "each of `prices`", Prices),
    ("A tenant", "each of `tenants`, in a file of their own or in place", Tenant),
    ("What a tenant was promised", "`slo` of a tenant", Slo),
]
HEAD = """# Configuration

Every setting, as the code has it: `python -m serve_app.checks.reference` writes this page. Names
end in their unit: `_s` seconds, `_ms` milliseconds. A name that is not here is refused before the
start, and so is a value that cannot work:

    fairstream-check configs/local.yaml

"""
ENVIRONMENT = """
## The environment

| variable | what it does |
|---|---|
| `FAIRSTREAM_KEY_SECRET` | secret with which digests of API keys are keyed (`hmac-sha256:...`) |
| `FAIRSTREAM_REDIS_PASSWORD` | of the Redis in `usage`, where its URL has none |
| `OTEL_EXPORTER_OTLP_ENDPOINT` | where spans go, over HTTP, unless `spans_to` says it |
| other `OTEL_...` | headers, sampler, queue, name of the service: as OpenTelemetry's SDK has them |
| `HF_TOKEN` | for models of the Hugging Face hub that ask for one |
"""


def reference() -> str:
    """The page, in Markdown."""
    return HEAD + "\n".join(_section(*part) for part in PARTS) + ENVIRONMENT


def _section(title: str, where: str, kind: type) -> str:
    lead = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    lead = lead.split(" Raises ValueError")[0]
    rows = "\n".join(_rows(kind))
    table = f"| option | type | default | what it does |\n|---|---|---|---|\n{rows}\n"
    return f"## {title}\n\nIn {where}. {lead}\n\n{table}"


def _rows(kind: type) -> Iterator[str]:
    schema = TypeAdapter(kind).json_schema()
    definitions = schema.get("$defs", {})
    meanings = attribute_docstrings(kind)
    for name, field in schema["properties"].items():
        if kind is ScalingLimits and name in BOUNDS_OF_SERVE:
            continue
        default = "required" if name in schema.get("required", ()) else _default(field)
        cells = (f"`{name}`", _type(field, definitions), default, meanings.get(name, ""))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def attribute_docstrings(kind: type) -> dict[str, str]:
    """What stands below each field of a class, in one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            value = ast.literal_eval(text.value)
            found[ast.unparse(field.target)] = " ".join(str(value).split())
    return found


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if value is None or isinstance(value, dict):
        return ""
    return f"`{_yaml(value)}`" if value != [] else "none"


def _yaml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value)


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    if (several := field.get("anyOf") or field.get("oneOf")) is not None:
        kinds = dict.fromkeys(_type(each, definitions) for each in several)
        return " or ".join(kind for kind in kinds if kind != "null")
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[1]
        return f"[options](#{LINKS[name]})"
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}), definitions)}".removesuffix(" of any")
    if field.get("type") == "object":
        return f"of each name, {_type(field['additionalProperties'], definitions)}"
    return _bounded(field)


def _bounded(field: dict[str, Any]) -> str:
    kinds = {"string": "text", "integer": "integer", "number": "number", "boolean": "true, false"}
    kind = kinds.get(field.get("type", ""), field.get("type", "any"))
    signs = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
    }
    bounds = [
        f"{sign} {field[name]:g}"
        for name, sign in signs.items()
        if name in field and field[name] != UNBOUNDED
    ]
    return " ".join([kind, ", ".join(bounds)]).strip()


if __name__ == "__main__":
    print(reference(), end="")

"""The JSON Schema of policy files."""

import json
from typing import Any

from .settings import Settings

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


def schema_text() -> str:
    """Return docs/policy.schema.json."""
    schema = {"$schema": SCHEMA_ID, **Settings.model_json_schema(by_alias=True, mode="validation")}
    schema["title"] = "kvtier policy"
    # Where a daemon listens by default is its environment's, not this machine's.
    schema["properties"]["listen"].pop("default", None)
    _straighten(schema)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _straighten(part: Any) -> None:
    """Write every description in one line, as editors show it. Mutates `part`."""
    for below in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _straighten(below)
    if isinstance(part, dict) and isinstance(part.get("description"), str):
        part["description"] = " ".join(part["description"].split())

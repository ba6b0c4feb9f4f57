"""docs/policy-settings.md: the table of settings, from the models themselves."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from kvtier.appliance.config import Settings, is_live


def reference_table() -> str:
    """Return one line per setting: key, default, whether it can change while the daemon runs, meaning."""
    lines = ["| setting | default | live | meaning |", "|---|---|---|---|"]
    schema = Settings.model_json_schema(by_alias=True)
    for key, default, meaning in _rows(schema, schema, ""):
        live = "yes" if is_live(key) else "restart"
        lines.append(f"| `{key}` | {default} | {live} | {meaning} |")
    return "\n".join(lines) + "\n"


def setting_keys() -> list[str]:
    """Return the dotted keys of all settings that hold a value: no sections, no mappings of sections."""
    schema = Settings.model_json_schema(by_alias=True)
    keys = [key for key, _, _ in _rows(schema, schema, "")]
    return [key for key in keys if not any(other.startswith((f"{key}.", f"{key}[")) for other in keys)]


def _rows(part: dict[str, Any], schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    for key, described in part["properties"].items():
        path = f"{prefix}{key}"
        below = _model(described, schema)
        meaning = _one_line(described.get("description", ""))
        if below is None:
            is_needed = key in part.get("required", ())
            yield path, "must be given" if is_needed else _default(path, described), meaning
            for keyword, place in (("additionalProperties", ".NAME."), ("items", "[].")):
                if (one := _model(described.get(keyword, {}), schema)) is not None:
                    yield from _rows(one, schema, f"{path}{place}")
        else:
            if {"type": "null"} in described.get("anyOf", ()):
                yield path, "none", meaning
            yield from _rows(below, schema, f"{path}.")
    if (other := _model(part.get("additionalProperties", {}), schema)) is not None:
        yield from _rows(other, schema, f"{prefix}NAME.")


def _model(described: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the mapping that a value is; None when it is something else."""
    if not isinstance(described, dict):  # additionalProperties may be just true
        return None
    for way in (described, *described.get("anyOf", ()), *described.get("allOf", ())):
        if "$ref" in way:
            found: dict[str, Any] = schema["$defs"][way["$ref"].removeprefix("#/$defs/")]
            return found if "properties" in found else None
    return None


def _default(path: str, described: dict[str, Any]) -> str:
    """Return the default as people write it."""
    if path == "listen":
        return "the usual socket"
    value: Any = _whole().canonical()
    for key in path.split("."):
        value = value.get(key, ...) if isinstance(value, dict) else ...
    if value is ...:
        value = described.get("default")
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


@cache
def _whole() -> Settings:
    """Return settings with every tier in them, all else by default."""
    nvme = {"path": "/var/lib/kvtier", "capacity": "1TiB"}
    return Settings.load_traced(None, {}, [f"tiers={json.dumps({'hbm': {}, 'nvme': nvme})}"])[1]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

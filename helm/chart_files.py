"""What is generated into the chart (`make docs`): values.yaml, values.schema.json, README.md,
files/live.yaml."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvtier.appliance.config import LIVE, Settings

from .values import DEFAULT_POLICY, ChartValues

CHART = Path(__file__).parent / "kvtier"
WIDTH = 108

HEAD = """# Values of the chart. Generated from helm/values.py by `make docs`; README.md has them as a table.
# yaml-language-server: $schema=values.schema.json
"""
README = """# kvtier on Kubernetes

One daemon per node that has runtimes on it: a DaemonSet, a Unix socket in a host folder, and a ConfigMap that
tells runtimes where it is. [docs/operate/kubernetes.md](../../docs/operate/kubernetes.md) is the guide.

    helm install kvtier helm/kvtier --namespace kvtier --create-namespace \\
      --set image.repository=REGISTRY/kvtier --set-string 'nodeSelector.nvidia\\.com/gpu\\.present=true'

Generated from `helm/values.py` by `make docs`. `values.schema.json` holds all of this, the policy included:
a misspelt value is refused before anything is installed. `ci/` has whole examples.

"""


def chart_files() -> Iterator[tuple[Path, bytes]]:
    """Yield (path, content) of every generated file of the chart."""
    yield CHART / "values.yaml", values_yaml().encode()
    yield CHART / "values.schema.json", schema_text().encode()
    yield CHART / "README.md", (README + table()).encode()
    live = yaml.safe_dump({"live": list(LIVE)}, sort_keys=False)
    yield CHART / "files" / "live.yaml", f"# Generated from appliance/config/live.py.\n{live}".encode()


def values_yaml() -> str:
    """Return values.yaml: every value with its sentence and default."""
    return HEAD + "\n".join(_lines(ChartValues, ChartValues(), 0)) + "\n"


def schema_text() -> str:
    """Return values.schema.json. Without defaults: a default that is shown but not applied would mislead."""
    schema = ChartValues.model_json_schema(by_alias=True, mode="validation")
    _tidy(schema)
    schema["$defs"]["NvmeTier"]["required"] = ["capacity"]  # the path is that of the mount
    schema["properties"]["global"] = {"type": "object", "description": "Of a parent chart; not used."}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "kvtier chart values",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def table() -> str:
    """Return one line per value: name, default, meaning."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for name, default, meaning in _rows(ChartValues, ChartValues(), ""):
        lines.append(f"| `{name}` | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------- private


def _sections(model: type[BaseModel], values: BaseModel) -> Iterator[tuple[str, FieldInfo, Any, str]]:
    """Yield (name in YAML, field, default, sentence) of every field."""
    for name, field in model.model_fields.items():
        value = getattr(values, name)
        sentence = field.description or (type(value).__doc__ if isinstance(value, BaseModel) else "") or ""
        yield field.alias or name, field, value, " ".join(sentence.split())


def _is_section(value: Any) -> bool:
    return isinstance(value, BaseModel) and not isinstance(value, Settings)


def _plain(value: Any) -> Any:
    return DEFAULT_POLICY if isinstance(value, Settings) else value


def _lines(model: type[BaseModel], values: BaseModel, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, _, value, sentence in _sections(model, values):
        if depth == 0:
            yield ""
        yield from _comment(sentence, indent)
        if _is_section(value):
            yield f"{indent}{name}:"
            yield from _lines(type(value), value, depth + 1)
        else:
            text = yaml.safe_dump({name: _plain(value)}, sort_keys=False, width=WIDTH)
            yield from (indent + line for line in text.splitlines())


def _comment(sentence: str, indent: str) -> Iterator[str]:
    line = f"{indent}# --"
    for word in sentence.split():
        if len(line) + len(word) >= WIDTH:
            yield line
            line = f"{indent}#"
        line += f" {word}"
    yield line


def _rows(model: type[BaseModel], values: BaseModel, prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, _, value, sentence in _sections(model, values):
        if _is_section(value):
            yield f"{prefix}{name}", "", _cell(sentence)
            yield from _rows(type(value), value, f"{prefix}{name}.")
        else:
            default = json.dumps(_plain(value)) if value != "" else '""'
            yield f"{prefix}{name}", f"`{_cell(default)}`", _cell(sentence)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _tidy(part: Any) -> None:
    """Drop defaults and titles, write descriptions in one line. Mutates `part`."""
    for key, below in (
        part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    ):
        if key == "properties":
            for described in below.values():
                described.pop("default", None)
                described.pop("title", None)
        _tidy(below)
    if isinstance(part, dict) and isinstance(part.get("description"), str):
        part["description"] = " ".join(part["description"].split())

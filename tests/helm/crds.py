"""The part of the Prometheus operator's resources that the chart uses, as schemas: its own are megabytes, and
no registry has them. After monitoring.coreos.com_{podmonitors,servicemonitors,prometheusrules}.yaml."""

from typing import Any

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
RELABELING = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "action": {"enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep", "hashmod"]},
        "sourceLabels": {"type": "array", "items": {"type": "string"}},
        **{name: {"type": "string"} for name in ("targetLabel", "regex", "replacement", "separator")},
    },
}
ENDPOINT = {
    "type": "object",
    "required": ["port"],
    "additionalProperties": False,
    "properties": {
        "port": {"type": "string"},
        "path": {"type": "string"},
        "interval": {"type": "string", "pattern": "^(([0-9]+)(ms|s|m|h|d))+$"},
        "relabelings": {"type": "array", "items": RELABELING},
        "metricRelabelings": {"type": "array", "items": RELABELING},
    },
}
RULE = {
    "type": "object",
    "required": ["alert", "expr"],
    "additionalProperties": False,
    "properties": {
        "alert": {"type": "string"},
        "expr": {"type": "string"},
        "for": {"type": "string", "pattern": "^(([0-9]+)(ms|s|m|h|d))+$"},
        "labels": TEXTS,
        "annotations": TEXTS,
    },
}
GROUP = {
    "type": "object",
    "required": ["name", "rules"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "rules": {"type": "array", "items": RULE}},
}
SELECTOR = {"type": "object", "required": ["matchLabels"], "properties": {"matchLabels": TEXTS}}


def _monitor(endpoints: str) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["selector", endpoints],
        "additionalProperties": False,
        "properties": {"selector": SELECTOR, endpoints: {"type": "array", "items": ENDPOINT}},
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "PodMonitor": _monitor("podMetricsEndpoints"),
    "ServiceMonitor": _monitor("endpoints"),
    "PrometheusRule": {
        "type": "object",
        "required": ["groups"],
        "additionalProperties": False,
        "properties": {"groups": {"type": "array", "items": GROUP}},
    },
}


def validate(manifest: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError when a manifest is not what the operator takes."""
    import jsonschema

    assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
    jsonschema.validate(manifest["spec"], SCHEMAS[manifest["kind"]])

"""Value types of settings: each parses and checks text with units, prints one form, and has a schema."""

from pathlib import Path
from typing import Annotated, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from ...v1.addresses import check_address
from . import units
from .host_share import format_capacity, parse_capacity


class Section(BaseModel):
    """A mapping of the policy file. Refuses unknown keys and values of another type; is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


# Patterns for editors: the languages that units.py reads. (tests/appliance/config compares them.)
BYTES_PATTERN = r"^\s*[0-9]+(\.[0-9]+)?\s*([KkMmGgTtPp]([Ii][Bb]?|[Bb])|[Bb])?\s*$"
SECONDS_PATTERN = r"^\s*([0-9]+(\.[0-9]+)?\s*(ns|us|ms|d|h|m|s)\s*)+$"
FRACTION_PATTERN = r"^\s*(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?)\s*%\s*$"


def _quantity(pattern: str, number: str, *examples: str, **bounds: float) -> WithJsonSchema:
    """Return the schema of a value that is text with a unit, or a bare number."""
    ways = [{"type": "string", "pattern": pattern}, {"type": number, "minimum": 0, **bounds}]
    return WithJsonSchema({"anyOf": ways, "examples": list(examples)})


Bytes = Annotated[
    int,
    BeforeValidator(units.parse_bytes),
    PlainSerializer(units.format_bytes, return_type=str),
    _quantity(BYTES_PATTERN, "integer", "64MiB", "256GiB"),
]
Seconds = Annotated[
    float,
    BeforeValidator(units.parse_duration),
    PlainSerializer(units.format_duration, return_type=str),
    _quantity(SECONDS_PATTERN, "number", "500ms", "30s", "10m"),
]
Fraction = Annotated[
    float,
    BeforeValidator(units.parse_fraction),
    PlainSerializer(units.format_fraction, return_type=str),
    _quantity(FRACTION_PATTERN, "number", "90%", maximum=1),
]


Capacity = Annotated[
    int,
    PlainValidator(parse_capacity),
    PlainSerializer(format_capacity, return_type=str),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": f"{BYTES_PATTERN}|{FRACTION_PATTERN}|^auto$"},
                {"type": "integer", "minimum": 0},
            ],
            "examples": ["auto", "256GiB", "40%"],
        }
    ),
]


def _directory(value: object) -> Path:
    """Read an absolute path; `~` is not expanded, because a daemon has no home."""
    if not isinstance(value, str | Path) or not Path(value).is_absolute():
        raise ValueError(f"must be an absolute path such as /var/lib/kvtier; is {str(value)!r}")
    return Path(value)


def _switch(value: object) -> object:
    """YAML reads a bare `on` or `off` as a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _unique_nodes(nodes: list[int]) -> list[int]:
    for node in nodes:
        if not 0 <= node < 1024 or nodes.count(node) > 1:
            raise ValueError(f"must name each NUMA node once, as in `numactl --hardware`; is {nodes}")
    return nodes


def _daily_writes(value: object) -> object:
    """Read a size, or a word for one."""
    if value in ("auto", "unlimited"):
        return value
    try:
        return units.parse_bytes(value)
    except ValueError as problem:
        raise ValueError(f"{problem}; or `auto`, or `unlimited`") from problem


def _addresses(value: object) -> list[str]:
    """Read one address or a list of them."""
    addresses = [value] if isinstance(value, str) else value
    if not isinstance(addresses, list) or not addresses:
        raise ValueError("must be an address or a list of them, such as unix:///run/kvtier/kvtier.sock")
    checked = [check_address(address) for address in addresses]
    if len(set(checked)) < len(checked):
        raise ValueError(f"names an address twice: {', '.join(checked)}")
    return checked


Directory = Annotated[
    Path,
    BeforeValidator(_directory),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string"}),
]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]
Share = Annotated[Literal["off", "worth", "eager"], BeforeValidator(_switch)]
Addresses = Annotated[
    list[str],
    BeforeValidator(_addresses),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Nodes = Annotated[list[int], AfterValidator(_unique_nodes)]
DailyWrites = Annotated[
    int | Literal["auto", "unlimited"],
    BeforeValidator(_daily_writes),
    PlainSerializer(lambda size: size if isinstance(size, str) else units.format_bytes(size)),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", "unlimited"]},
                {"type": "string", "pattern": BYTES_PATTERN},
                {"type": "integer", "minimum": 0},
            ],
            "examples": ["auto", "2TiB", "unlimited"],
        }
    ),
]
Count = Annotated[int, Field(ge=1, le=1 << 24)]


def refuse(key: str, sentence: str) -> NoReturn:
    """Refuse a combination of fields; `key` is the one to change."""
    raise PydanticCustomError("kvtier", "{sentence}", {"key": key, "sentence": sentence})


def require_multiple(key: str, num_bytes: int, step_bytes: int) -> None:
    """Refuse a size that is zero or no multiple of a step."""
    if num_bytes == 0 or num_bytes % step_bytes:
        near_bytes = (-(-num_bytes // step_bytes) or 1) * step_bytes
        step, near = units.format_bytes(step_bytes), units.format_bytes(near_bytes)
        refuse(key, f"{units.format_bytes(num_bytes)} is not a multiple of {step}; write {near}")

"""Profiles as files: YAML that people read, and tables beside it.

    near-lossless.yaml     model, geometry, a rule a line, what calibration measured, the digest
    near-lossless.tables   the tables of `transform`, one after the other; absent without them

The file repeats the profile's digest, and reading compares it: a number changed by hand is noticed before it
decodes anything. It is no signature: only the administrator writes profiles. Numbers are read as YAML has
them and nothing else: no tags, no Python objects.
"""

import itertools
from pathlib import Path
from typing import Any

import yaml

from ....v1.files import read_regular_file
from .profile import PLANES, VERSION, Profile, ProfileError, Rule

MAX_FILE_BYTES = 16 << 20
MAX_TABLE_BYTES = 1 << 30
SUFFIX = ".yaml"
_DEFAULTS = {"bits": 0, "axis": "token", "group_tokens": 0, "step": 0.0, "reserve_bits": 0.0, "table": -1}
_FIELDS = {
    "kvtier_profile",
    "digest",
    "model",
    "geometry",
    "rules",
    "tables",
    "calibration",
}


def write_profile(profile: Profile, path: Path) -> None:
    """Write `path` (ending in .yaml) and, when there are tables, its neighbour. Raises OSError."""
    lines = [
        f"kvtier_profile: {VERSION}",
        f"digest: {profile.digest.hex()}",
        f"model: {profile.model_digest.hex()}",
        f"geometry: {_flow(profile.geometry())}",
    ]
    if profile.tables:
        lines.append(f"tables: {_flow([len(table) for table in profile.tables])}")
        path.with_suffix(".tables").write_bytes(b"".join(profile.tables))
    if profile.calibration:
        lines.append(f"calibration: {_flow(dict(profile.calibration))}")
    lines.append("rules:")
    lines += [f"- {_flow(_rule_to_yaml(rule))}" for rule in profile.rules]
    path.write_text("\n".join(lines) + "\n")


def read_profile(path: Path) -> Profile:
    """Return the profile of a file. Raises ProfileError, naming the file and the fix, and OSError."""
    try:
        document = yaml.safe_load(read_regular_file(path, MAX_FILE_BYTES))
        return _profile_of(document, path)
    except (ProfileError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"{path}: a field is missing or of another type ({error})") from error
    except RecursionError as error:
        raise ProfileError(f"{path}: nested too deeply") from error


def _profile_of(document: Any, path: Path) -> Profile:
    if not isinstance(document, dict) or document.get("kvtier_profile") != VERSION:
        raise ProfileError(f"no profile of version {VERSION}; `kvtier calibrate` writes them")
    if unknown := document.keys() - _FIELDS:
        raise ProfileError(f"unknown fields {', '.join(map(str, unknown))}")
    geometry = document["geometry"]
    profile = Profile(
        model_digest=bytes.fromhex(document["model"]),
        num_layers=int(geometry["num_layers"]),
        num_kv_heads=int(geometry["num_kv_heads"]),
        head_dim=int(geometry["head_dim"]),
        num_planes=int(geometry["num_planes"]),
        dtype=geometry["dtype"],
        rules=tuple(rule for entry in document["rules"] for rule in _rules_of_yaml(entry)),
        tables=_read_tables(path.with_suffix(".tables"), document.get("tables", [])),
        calibration=document.get("calibration", {}),
    )
    if profile.digest.hex() != document.get("digest"):
        raise ProfileError(
            f"it was changed: its content has digest {profile.digest.hex()}, it says "
            f"{document.get('digest')}; calibrate again, or write that digest into it if the change was meant"
        )
    return profile


def _read_tables(path: Path, lengths: list[int]) -> tuple[bytes, ...]:
    if not lengths:
        return ()
    tables = read_regular_file(path, MAX_TABLE_BYTES)
    if min(lengths) < 0 or len(tables) != sum(lengths):
        raise ProfileError(f"{path} is not {sum(lengths)} bytes long")
    ends = list(itertools.accumulate(lengths))
    return tuple(tables[end - length : end] for length, end in zip(lengths, ends, strict=True))


def _rule_to_yaml(rule: Rule) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "layers": str(rule.layer),
        "plane": PLANES[rule.plane],
        "heads": f"{rule.first_head}-{rule.end_head - 1}",
        "coder": rule.coder,
    }
    return entry | {
        name: getattr(rule, name) for name, default in _DEFAULTS.items() if getattr(rule, name) != default
    }


def _rules_of_yaml(entry: dict[str, Any]) -> list[Rule]:
    """Return one rule for each layer an entry names; by hand one writes `layers: 4-31`."""
    if unknown := entry.keys() - {"layers", "plane", "heads", "coder", *_DEFAULTS}:
        raise ProfileError(f"unknown fields of a rule: {', '.join(map(str, unknown))}")
    first_layer, end_layer = _range(entry["layers"])
    first_head, end_head = _range(entry["heads"])
    if end_layer - first_layer > 1 << 12:
        raise ProfileError(f"layers {entry['layers']} are too many")
    options = {name: entry[name] for name in _DEFAULTS if name in entry}
    plane = PLANES.index(entry["plane"])
    return [
        Rule(layer, plane, first_head, end_head, entry["coder"], **options)
        for layer in range(first_layer, end_layer)
    ]


def _range(text: str | int) -> tuple[int, int]:
    """Return first and end of `3` or `0-7`."""
    first, _, last = str(text).partition("-")
    return int(first), int(last or first) + 1


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1 << 30)
    return text.strip()

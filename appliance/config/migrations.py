"""Policy files of former formats, brought to the present one, comments and order kept.

    schema_version: 0      what early drafts were written in
    schema_version: 1      now

A migration is a list of small edits of the *text*: a key gets another name, a value is written in another
way. PyYAML says where in the text each stands, and nothing else is touched. Loading the values and printing
them anew was rejected: it loses every comment, and comments are where people say why a number is what it is.

A file of a former format is refused by everybody else with the command that brings it up; one of a later
format is refused by this, too: what a newer kvtier meant by it cannot be known here.
"""

import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import yaml

from . import marked_yaml
from .marked_yaml import YamlError

VERSION = 1
KEY = "schema_version"

Value: TypeAlias = Callable[[str], str]


class Edit(NamedTuple):
    """At `path` (`*` stands for any key): call the key `name`, write the value as `value` says."""

    path: str
    name: str = ""
    value: Value | None = None


def _percent(text: str) -> str:
    """A bare number was a percentage."""
    return f"{text}%" if re.fullmatch(r"[0-9.]+", text) and float(text) > 1 else text


def _seconds(text: str) -> str:
    """A bare number was seconds, and reads as such still; with its unit it says so."""
    return f"{text}s" if re.fullmatch(r"[0-9.]+", text) else text


def _always(instead: str) -> Value:
    """Whatever stood there."""
    return lambda _: instead


#: By the version they start from. Paths are those of that version.
MIGRATIONS: dict[int, list[Edit]] = {
    0: [
        Edit("tiers.*.size", "capacity"),
        Edit("tiers.nvme.directory", "path"),
        Edit("watermark", "watermarks"),
        Edit("watermark.high", value=_percent),
        Edit("watermark.low", value=_percent),
        Edit("leases.max_ttl", "ttl_max"),
        Edit("leases.*", value=_seconds),
    ],
}


class CannotMigrate(ValueError):
    """The file is of no version that can be brought up; the message says what to do. `line` is 0 where there
    is none."""

    def __init__(self, sentence: str, line: int = 0) -> None:
        super().__init__(sentence)
        self.line = line


def advice(version: object) -> str:
    """Return what to do with a file of a version that is not the present one."""
    if isinstance(version, int) and not isinstance(version, bool):
        if version > VERSION:
            return "a newer kvtier wrote this file: upgrade, or write it for this one"
        if version in MIGRATIONS:
            return "bring it up with `kvtier policy migrate`"
    return f"write {KEY}: {VERSION}"


def migrate(text: str) -> str:
    """Return `text` in the present format; unchanged when it is already. Raises CannotMigrate, YamlError."""
    version = version_of(text)
    while version < VERSION:
        if version not in MIGRATIONS:
            raise CannotMigrate(f"{KEY} {version} never was; {advice(version)}")
        version += 1
        text = _apply([*MIGRATIONS[version - 1], Edit(KEY, value=_always(str(version)))], text)
    return text


def version_of(text: str) -> int:
    """Return the version a file says it is of; the present one when it says nothing. Raises CannotMigrate."""
    document = marked_yaml.read(text)
    if not isinstance(document.value, dict):
        raise CannotMigrate("a policy is a mapping, such as `tiers: ...`", document.lines.get((), 0))
    version = document.value.get(KEY, VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= VERSION:
        raise CannotMigrate(f"{KEY}: is {version!r}; {advice(version)}", document.lines.get((KEY,), 0))
    return version


def _apply(edits: list[Edit], text: str) -> str:
    """Carry out edits, the last place in the text first, so that earlier places stay where they are."""
    changes: list[tuple[int, int, str]] = []  # start, end, what stands there instead
    taken: dict[tuple[str, ...], str] = {}

    def visit(node: yaml.Node, path: tuple[str, ...]) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key_node, value_node in node.value:
            here = (*path, key_node.value)
            new_name = key_node.value
            for edit in edits:
                if not _matches(edit.path, here):
                    continue
                if edit.name:
                    new_name = edit.name
                    changes.append((key_node.start_mark.index, key_node.end_mark.index, edit.name))
                if edit.value is not None and isinstance(value_node, yaml.ScalarNode):
                    start, end = value_node.start_mark.index, value_node.end_mark.index
                    changes.append((start, end, edit.value(text[start:end])))
            if (*path, new_name) in taken:
                line = key_node.start_mark.line + 1
                raise CannotMigrate(f"{'.'.join(here)} and {taken[*path, new_name]} mean the same", line)
            taken[*path, new_name] = ".".join(here)
            visit(value_node, here)

    loader = yaml.SafeLoader(text)
    root = loader.get_single_node()
    if root is not None:
        visit(root, ())
    for start, end, instead in sorted(changes, reverse=True):
        text = text[:start] + instead + text[end:]
    return text


def _matches(pattern: str, path: tuple[str, ...]) -> bool:
    parts = pattern.split(".")
    return len(parts) == len(path) and all(p in ("*", k) for p, k in zip(parts, path, strict=True))


__all__ = ["VERSION", "CannotMigrate", "YamlError", "advice", "migrate", "version_of"]

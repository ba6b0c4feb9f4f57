"""Keeps the sources of a daemon's settings, so that a reload reads them again.

The file may change while the daemon runs; environment and command line stay those of its start and keep their
precedence. So a reload cannot change a setting from the command line; `kvtier policy show` prints the source
of every value.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .marked_yaml import KeyPath
from .settings import Settings
from .sources import Gathered, gather, read_policy

DEFAULT_SOURCE = "default"


class Loaded(NamedTuple):
    """Settings, the source of each value, and the origin to read them from again, if there is one."""

    settings: Settings
    gathered: Gathered = Gathered()
    origin: "Origin | None" = None
    text: str | None = None  # of the origin's own file, when that is where they are from

    def rows(self) -> Iterator[tuple[str, object, str]]:
        """Yield (dotted key, value as people write it, its source) of every setting."""
        for path, value in leaves(self.settings.canonical()):
            yield ".".join(map(str, path)), value, self.source_of(path)

    def source_of(self, path: KeyPath) -> str:
        """Return where the value at `path` was written: it itself, or a list or mapping it is part of."""
        values: Any = self.gathered.values
        for key in path:
            if not isinstance(values, dict) or key not in values:
                return DEFAULT_SOURCE
            values = values[key]
        return self.gathered.source_of(path)


@dataclass(frozen=True, slots=True)
class Origin:
    """The arguments of Settings.load, kept. `path` is None where there is no file."""

    path: Path | None = None
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    overrides: tuple[str, ...] = ()

    def load(self, text: str | None = None, name: str = "") -> Loaded:
        """Read everything anew. `text` stands for the file's, under the name `name`. Raises SettingsError."""
        own_text = self.read() if text is None else None
        given = own_text if text is None else text
        gathered, settings = Settings.load_traced(self._path(text, name), self.env, self.overrides, given)
        return Loaded(settings, gathered, self, own_text)

    def read(self) -> str | None:
        """Return what is in the file; None when there is none, or it cannot be read: loading it says why."""
        try:
            return read_policy(self.path) if self.path is not None else None
        except (OSError, UnicodeDecodeError):
            return None

    def gather(self, text: str | None = None, name: str = "") -> Gathered:
        """Read everything anew, and check nothing but that it can be read. Raises SettingsError."""
        return gather(Settings, self._path(text, name), self.env, self.overrides, text)

    def _path(self, text: str | None, name: str) -> Path | None:
        return self.path if text is None else Path(name or self.path or "policy.yaml")


def leaves(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield (path, value) of everything in nested mappings that is no mapping itself, empty ones included."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, (*path, key))
    else:
        yield path, value

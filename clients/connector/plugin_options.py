"""Settings of plug-ins: what a runtime's configuration says, checked at its start, with errors that name
the fix.

A plug-in's options are a frozen dataclass of strings and numbers with defaults. Unknown names are refused:
a misspelt setting that is silently ignored costs an administrator a day.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ..errors import InvalidRequest
from ..weights import checkpoint_digest, find_checkpoint

Options = TypeVar("Options")


def options_from(
    kind: type[Options],
    settings: Mapping[str, Any],
    what: str,
    least: Mapping[str, float] | None = None,
    most: Mapping[str, float] | None = None,
) -> Options:
    """Return options of `kind`, a dataclass. Raises InvalidRequest naming the setting and what it may be.

    Numbers must be above 0, or not below `least`, and at most `most`, by name.
    """
    least, most = least or {}, most or {}
    hints = get_type_hints(kind)
    for name, given in settings.items():
        if name not in hints:
            known = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
            raise bad_option(f"unknown setting {name!r} of {what}; it knows {known}")
        wanted = hints[name]
        is_right = isinstance(given, (int, float) if wanted is float else wanted)
        if not is_right or (isinstance(given, bool) and wanted is not bool):
            raise bad_option(f"{name} of {what} must be {wanted.__name__}, is {given!r}")
        if wanted not in (int, float):
            continue
        if not (given >= least[name] if name in least else given > 0):
            bound = f"at least {least[name]:g}" if name in least else "above 0"
            raise bad_option(f"{name} of {what} must be {bound}, is {given!r}")
        if name in most and not given <= most[name]:
            raise bad_option(f"{name} of {what} must be at most {most[name]:g}, is {given!r}")
    return kind(**settings)


def check_choice(name: str, given: str, choices: tuple[str, ...]) -> None:
    """Raise InvalidRequest unless `given` is one of `choices`."""
    if given not in choices:
        raise bad_option(f"{name} must be one of {', '.join(choices)}, is {given!r}")


def digest_from(text: str, name: str = "weights_digest") -> bytes:
    """Return the digest that `text` is in hexadecimal. Raises InvalidRequest unless it is 16 to 64 bytes."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        raise bad_option(f"{name} must be hexadecimal, is {text!r}") from None
    if not 16 <= len(digest) <= 64:
        raise bad_option(f"{name} must be 16 to 64 bytes, is {len(digest)}")
    return digest


def bad_option(message: str) -> InvalidRequest:
    """Return (not raise) the error of a wrong setting. It is a ValueError, too."""
    return InvalidRequest(message, reason="BAD_OPTION")


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """Settings that all plug-ins over a ChainStore have. Raises InvalidRequest for a wrong digest."""

    target: str = ""  # of the daemon; empty: KVTIER_TARGET, or the usual socket
    name: str = ""  # of the client, for the daemon's status and logs
    domain: str = ""  # isolation domain
    weights: str = ""  # folder of the weights, where the model's name is no folder and not in the hub's cache
    weights_digest: str = ""  # hexadecimal; instead of reading the weights
    revision: str = ""  # of a model of the hub
    variant: str = ""  # whatever else changes the KV: overrides of the config, quantization at load time, ...
    lookup_timeout_s: float = 0.5
    load_timeout_s: float = 5.0
    store_timeout_s: float = 5.0
    staging_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.weights_digest:
            digest_from(self.weights_digest)

    def weights_of(self, model: str) -> bytes:
        """Return the digest of the weights: as given, or of the files they are loaded from.

        Raises InvalidRequest when there are none: the name that a model is served by need not be a path.
        """
        if self.weights_digest:
            return digest_from(self.weights_digest)
        return checkpoint_digest(self.folder_of(model))

    def folder_of(self, model: str) -> Path:
        """Return where the weights are. Raises InvalidRequest when they are not on this host."""
        if self.weights:
            return Path(self.weights).expanduser()
        return find_checkpoint(model, self.revision or None)

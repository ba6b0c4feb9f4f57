"""Settings of plug-ins: what a runtime's configuration says, checked at its start, with errors that name
the fix.

A plug-in's options are a frozen dataclass of strings and numbers with defaults. Unknown names are refused:
a misspelt setting that is silently ignored costs an administrator a day.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from ..errors import InvalidRequest

Options = TypeVar("Options")


def options_from(
    kind: type[Options], settings: Mapping[str, Any], what: str, may_be_zero: Collection[str] = ()
) -> Options:
    """Return options of `kind`, a dataclass. Raises InvalidRequest naming the setting and what it may be.

    Numbers must be above 0, those named in `may_be_zero` not below.
    """
    hints = get_type_hints(kind)
    for name, given in settings.items():
        if name not in hints:
            known = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
            raise bad_option(f"unknown setting {name!r} of {what}; it knows {known}")
        wanted = hints[name]
        is_right = isinstance(given, (int, float) if wanted is float else wanted)
        if not is_right or (isinstance(given, bool) and wanted is not bool):
            raise bad_option(f"{name} of {what} must be {wanted.__name__}, is {given!r}")
        if wanted in (int, float) and given <= 0 and (given < 0 or name not in may_be_zero):
            least = "at least 0" if name in may_be_zero else "above 0"
            raise bad_option(f"{name} of {what} must be {least}, is {given!r}")
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

"""Arguments of calls, checked where they come in: a wrong type is InvalidRequest with what to pass instead.

Without this protobuf, numpy or the memory copy would complain later, in words of their own, after some of the
call has happened. Each function returns the value as it travels.
"""

import operator
from collections.abc import Iterable, Sequence
from enum import IntEnum
from numbers import Real
from typing import Any, TypeVar

from .errors import InvalidRequest

E = TypeVar("E", bound=IntEnum)
T = TypeVar("T")


def text(name: str, value: Any) -> str:
    """Return a text that can be sent."""
    if not isinstance(value, str):
        raise _wrong(name, "a str", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name} has characters that UTF-8 cannot carry: {value!r}") from None
    return value


def digest(name: str, value: Any) -> bytes:
    """Return bytes, which must not be their hexadecimal text."""
    if not isinstance(value, bytes):
        hint = ", such as bytes.fromhex(...) of a hexadecimal digest" if isinstance(value, str) else ""
        raise _wrong(name, f"bytes{hint}", value)
    return value


def whole(name: str, value: Any, least: int = 0) -> int:
    """Return a whole number that is at least `least` and fits 64 bits."""
    try:
        found = operator.index(value)
    except TypeError:
        raise _wrong(name, "a whole number", value) from None
    if not least <= found < 1 << 63:
        raise InvalidRequest(f"{name} must be at least {least}, is {found}")
    return found


def number(name: str, value: Any, least: float = float("-inf")) -> float:
    """Return a number, infinite ones included, that is at least `least`."""
    if type(value) is not float and not isinstance(value, Real):  # asking an abstract class is slow
        raise _wrong(name, "a number", value)
    found = float(value)
    if not found >= least:
        raise InvalidRequest(
            f"{name} must be a number{f' of at least {least:g}' * (least > -1e9)}, is {found}"
        )
    return found


def member(name: str, value: Any, kind: type[E]) -> E:
    """Return a member of an enumeration."""
    try:
        return kind(value)
    except ValueError:
        members = ", ".join(one.name for one in kind)
        raise InvalidRequest(f"{name} must be one of {kind.__name__}'s {members}, is {value!r}") from None


def instance(name: str, value: Any, kind: type[T]) -> T:
    """Return a value of class `kind`."""
    if not isinstance(value, kind):
        raise _wrong(name, f"a {kind.__name__}", value)
    return value


def instances(name: str, values: Any, kind: type[T]) -> Sequence[T]:
    """Return values that all are of class `kind`."""
    if type(values) is tuple and not values:  # what most calls pass
        return values
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise _wrong(name, f"a list of {kind.__name__}", values)
    return [instance(f"each of {name}", one, kind) for one in values]


def _wrong(name: str, wanted: str, value: Any) -> InvalidRequest:
    shown = repr(value)
    shown = f"{shown[:40]}..." if len(shown) > 43 else shown
    return InvalidRequest(f"{name} must be {wanted}, is {type(value).__name__} {shown}")

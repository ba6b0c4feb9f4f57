"""Units people write (`64GiB`, `30s`, `90%`): read in many spellings, printed in one.

pydantic's ByteSize was tried: it reads bytes well but prints `64.0GiB`, loses exactness above 2**53 and
knows neither durations nor percentages. One small grammar for all three is shorter than three adapters, and
what is printed always reads back as the same value.
"""

import math
import re
from decimal import Decimal

_BINARY = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40, "PiB": 50}
_BYTES = {
    **{name.lower(): 1 << shift for name, shift in _BINARY.items()},
    **{name[:-1].lower(): 1 << shift for name, shift in _BINARY.items() if shift},  # Ki, Mi: Kubernetes
    **{f"{prefix}b": 10 ** (3 * n) for n, prefix in enumerate("kmgtp", 1)},
}
#: In nanoseconds, longest first: how a duration is printed.
_DURATION = {
    "d": 86_400 * 10**9,
    "h": 3_600 * 10**9,
    "m": 60 * 10**9,
    "s": 10**9,
    "ms": 10**6,
    "us": 10**3,
    "ns": 1,
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_PIECE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ns|us|ms|d|h|m|s)\s*")


def parse_bytes(value: object) -> int:
    """Return a number of bytes: an int is taken as it is, text needs a unit.

    `64GiB`, `64Gi` (as in Kubernetes) and `64GB` (decimal) are read. Raises ValueError, saying how to
    write it.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative; write a size such as 64GiB")
        return value
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    factor = _BYTES.get(match[2].lower() or "b") if match else None
    if match is None or factor is None:
        raise ValueError(f"{value!r} is not a size; write it like 512MiB, 64GiB or 3TiB")
    num_bytes = Decimal(match[1]) * factor
    if num_bytes != int(num_bytes):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(num_bytes)


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` exactly, in the largest binary unit that divides it: `64GiB`, `1536MiB`."""
    for name, shift in reversed(_BINARY.items()):
        if num_bytes >= 1 << shift and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{name}"
    return f"{num_bytes}B"


def about_bytes(num_bytes: float) -> str:
    """Return `num_bytes` to three digits, for people only: `1.46 GiB`."""
    for name, shift in reversed(_BINARY.items()):
        if num_bytes >= 1 << shift and shift:
            return f"{_three_digits(num_bytes / (1 << shift))} {name}"
    return f"{num_bytes:.0f} B"


def _three_digits(value: float) -> str:
    """Return `value` to three digits, `1,023` rather than `1.02e+03`."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def count(number: int, noun: str) -> str:
    """Return a number of things, for people only: `1 block`, `4,096 blocks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def parse_duration(value: object) -> float:
    """Return seconds: a number is taken as it is, text needs units: `30s`, `500ms`, `1h30m`, `7d`.

    Raises ValueError, saying how to write it.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value < math.inf:
            raise ValueError(f"{value} is not a duration; write it like 500ms, 30s or 10m")
        return float(value)
    text = value.strip() if isinstance(value, str) else ""
    pieces = list(_PIECE.finditer(text))
    if not pieces or "".join(piece[0] for piece in pieces) != text:
        raise ValueError(f"{value!r} is not a duration; write it like 500ms, 30s or 10m")
    nanoseconds = sum((Decimal(piece[1]) * _DURATION[piece[2]] for piece in pieces), Decimal(0))
    return float(nanoseconds / 10**9)


def format_duration(seconds: float) -> str:
    """Return `seconds` to the nanosecond: `30s`, `1h30m`, `500ms`."""
    left = round(seconds * 10**9)
    text = ""
    for name, nanoseconds in _DURATION.items():
        count, left = divmod(left, nanoseconds)
        if count:
            text += f"{count}{name}"
    return text or "0s"


def about_duration(seconds: float) -> str:
    """Return a duration in three digits and the unit that suits it, for people only: `4.2 s`, `1m35s`."""
    if seconds >= 60:
        return format_duration(round(seconds))
    return f"{seconds:.3g} s" if seconds >= 0.9995 or not seconds else f"{seconds * 1e3:.3g} ms"


def parse_fraction(value: object) -> float:
    """Return a share between 0 and 1 from `90%` or 0.9. Raises ValueError, saying how to write it."""
    share = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        share = float(value)
    elif isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", value)):
        share = float(Decimal(match[1]) / 100)
    if not 0 <= share <= 1:
        raise ValueError(f"{value!r} is not a share; write it like 90% or 0.9")
    return share


def format_fraction(share: float) -> str:
    """Return `share` as a percentage: `90%`, `12.5%`."""
    return f"{(Decimal(str(share)) * 100).normalize():f}%"

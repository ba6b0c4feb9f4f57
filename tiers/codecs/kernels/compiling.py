"""How loops are compiled, in one place."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(function: Loop) -> Loop:
    """Compile with the first call. Kept between runs where there is a place for it: a read-only root file
    system without a home has none, and compiles each time."""
    try:
        return cast(Loop, njit(nogil=True, cache=True, error_model="numpy")(function))
    except RuntimeError:  # numba's word for "no place to keep it"
        return cast(Loop, njit(nogil=True, error_model="numpy")(function))

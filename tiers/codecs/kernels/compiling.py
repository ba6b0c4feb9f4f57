"""How loops are compiled, in one place.

numba keeps what it compiled beside the source and takes it again while that file's time and size are the
same. Loops here call loops of their neighbours, which are compiled into them: a neighbour that changed
would go unnoticed, and in a wheel all files may have the same time. So the stamp is the content of all of
them.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(function: Loop) -> Loop:
    """Compile with the first call. Kept between runs where there is a place for it:
    a read-only root file system without a home has none, and compiles each time."""
    try:
        dispatcher = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba's word for "no place to keep it"
        return cast(Loop, njit(nogil=True, error_model="numpy")(function))
    dispatcher._cache._cache_file._source_stamp = _stamp()
    return cast(Loop, dispatcher)


@cache
def _stamp() -> str:
    """Return a digest of the source of all loops."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()

"""Public names of a package that are imported at first use.

Type checkers read the imports under TYPE_CHECKING beside the table; at run time a package is imported without
the runtime, asyncio or pydantic that its names need.
"""

from collections.abc import Callable, Mapping
from importlib import import_module


def on_demand(package: str, names_of: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package: imports a name at first use, raises AttributeError for others.

    `names_of`: names with spaces between, by the module that has them, relative to `package`.
    """
    homes = {name: module for module, names in names_of.items() for name in names.split()}

    def get(name: str) -> object:
        if name in homes:
            return getattr(import_module(homes[name], package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get

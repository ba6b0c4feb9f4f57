"""An index in memory, held to the contract of the real one (tests/contracts/test_finding.py)."""

from collections.abc import Sequence

from kvtier.sources.directories.addresses import DirectoryError


class FakeIndex:
    """A fleet's bundles. `is_down`: every call fails."""

    def __init__(self) -> None:
        self.lives: dict[bytes, set[int]] = {}
        self.is_down = False
        self.num_looks = 0

    async def add(self, life: int, keys: Sequence[bytes]) -> None:
        """See HolderIndex."""
        self._check()
        for key in keys:
            self.lives.setdefault(key, set()).add(life)

    async def remove(self, life: int, keys: Sequence[bytes]) -> None:
        """See HolderIndex."""
        self._check()
        for key in keys:
            self.lives.get(key, set()).discard(life)

    async def holders(self, keys: Sequence[bytes]) -> list[frozenset[int]]:
        """See HolderIndex."""
        self.num_looks += 1
        self._check()
        return [frozenset(self.lives.get(key, ())) for key in keys]

    async def close(self) -> None:
        """See HolderIndex."""

    def _check(self) -> None:
        if self.is_down:
            raise DirectoryError("it is down")

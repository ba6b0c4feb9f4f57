"""PolicyFacts: the catalog as policies see it. Names of one isolation domain mean nothing in another one.

A block key has the namespace in it, and the namespace its domain; but a policy knows by name alone what was
evicted and may come back. Were that the runtime's name, a tenant's put of a prompt that another tenant had
stored would be priced as a return: its blocks would stay longer, and the decision take longer, than those of
an unknown prompt. So a policy hears a name combined with a secret of the domain. The common domain's names
stay as they are, which costs nothing where there are no tenants.

The secret is an input, as all chance is here: the daemon draws one in each life, so what policies keep over a
restart forgets which of the tenants' blocks had been evicted. XOR is enough: the result is compared and never
shown, and without the secret no name can be chosen that meets another domain's."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import overload

from ....v1.shm import HASH_BYTES
from .catalog import Catalog


class PolicyFacts:
    """Implements BlockFacts over a catalog. Its columns grow and are never replaced."""

    def __init__(self, catalog: Catalog, secret: bytes) -> None:
        self._catalog = catalog
        self._secret = secret
        self._masks: dict[int, int] = {}  # by namespace; 0 in the common domain
        self._num_changes = 0  # of the catalog's namespaces, that were taken in
        self._names = _Names(catalog, self)
        self._is_plain = True  # no name differs from the runtime's
        self.namespace_id: Sequence[int] = catalog.namespace_id
        self.parent: Sequence[int] = catalog.parent
        self.first_child: Sequence[int] = catalog.first_child
        self.next_sibling: Sequence[int] = catalog.next_sibling
        self.position: Sequence[int] = catalog.position
        self.last_used: Sequence[float] = catalog.last_used
        self.num_uses: Sequence[int] = catalog.num_uses
        self.urgency: Sequence[int] = catalog.urgency
        self.block_bytes = catalog.block_bytes
        self.block_tokens = catalog.block_tokens
        self.retention = catalog.retention
        self.tier_of = catalog.tier_of

    @property
    def prefix_hash(self) -> Sequence[bytes]:
        """Names by row, as policies may know them."""
        self._look()
        return self._catalog.prefix_hash if self._is_plain else self._names

    @property
    def has_retention(self) -> bool:
        """Whether any block has another priority than the default."""
        return self._catalog.has_retention

    def names(self, namespace_id: int, prefix_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Return names that have no rows yet, as policies may know them."""
        self._look()
        mask = self._masks[namespace_id]
        return [_masked(name, mask) for name in prefix_hashes] if mask else prefix_hashes

    def name(self, row: int) -> bytes:
        """Return the name of one row, as policies may know it."""
        mask = self._masks.get(self._catalog.namespace_id[row], 0)  # none of a row that is free
        name = self._catalog.prefix_hash[row]
        return _masked(name, mask) if mask else name

    def _look(self) -> None:
        """Take in which namespaces there are."""
        if self._num_changes == self._catalog.num_namespace_changes:
            return
        self._num_changes = self._catalog.num_namespace_changes
        self._masks = {
            number: self._masks.get(number) or self._mask(namespace.identity.domain)
            for number, namespace in self._catalog.namespaces.items()
        }
        self._is_plain = not any(self._masks.values())

    def _mask(self, domain: str) -> int:
        if not domain:
            return 0
        digest = blake2b(domain.encode(), digest_size=HASH_BYTES, key=self._secret)
        return int.from_bytes(digest.digest())


class _Names(Sequence[bytes]):
    """The column of names as policies may know them."""

    def __init__(self, catalog: Catalog, facts: PolicyFacts) -> None:
        self._rows = catalog.prefix_hash
        self._facts = facts

    @overload
    def __getitem__(self, row: int) -> bytes: ...
    @overload
    def __getitem__(self, row: slice) -> list[bytes]: ...
    def __getitem__(self, row: int | slice) -> bytes | list[bytes]:
        if isinstance(row, slice):
            return [self._facts.name(one) for one in range(*row.indices(len(self._rows)))]
        return self._facts.name(row)

    def __len__(self) -> int:
        return len(self._rows)


def _masked(name: bytes, mask: int) -> bytes:
    return (int.from_bytes(name) ^ mask).to_bytes(HASH_BYTES) if name else name

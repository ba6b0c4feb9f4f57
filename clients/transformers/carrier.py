"""Carrier: blocks between the daemon and the layers of caches, piece by piece. Raises what the client raises.

    fill    look the prompt up per layer kind, read its blocks, give the layers what they would hold
    save    cut what the cache has computed since into blocks, write them

Bytes go through one buffer of `PIECE_BYTES` that is kept, so that a prompt of any length needs that much
host memory beside its tensors; and memory that was touched before is several times faster than fresh memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...v1.types import Geometry, NamespaceIdentity, PutOutcome, Tier, Urgency
from ..connector.layout import gather, scatter, shape_of
from ..connector.searching import lookup_after_search, whole_bundles
from ..sync import Client
from ..values.keys import prefix_hashes
from ..values.namespace import Namespace
from .cache import TieredCache
from .ledger import Ledger
from .plan import LayerKind, Saved, resume_point, whole_blocks
from .probe import CacheShape

States = list[tuple[Any, Any]]  # keys and values of each layer of a kind
NUM_GROUPS = 4  # layer groups of a block, unless told otherwise
PIECE_BYTES = 32 << 20
MAX_TRIES = 3  # of a load, while blocks leave as it reads them


class Carrier:
    """Carries for one model; `digest` names its weights. Not thread-safe."""

    def __init__(
        self,
        client: Client,
        shape: CacheShape,
        digest: bytes,
        block_tokens: int,
        align_tokens: int,
        layers_per_group: int,
    ) -> None:
        self.kinds = shape.kinds
        self.digest = digest
        self.geometries = [_geometry(kind, block_tokens, layers_per_group) for kind in shape.kinds]
        self._devices = shape.devices
        self._client = client
        self._block_tokens = block_tokens
        self._align_tokens = align_tokens
        self._registered: list[Namespace] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def namespaces(self) -> list[Namespace]:
        """Return the namespace of each layer kind, known to the daemon."""
        if not self._registered:
            shards = [f"kind={number},window={kind.window_tokens}" for number, kind in enumerate(self.kinds)]
            self._registered = [
                self._client.register(NamespaceIdentity(self.digest, geometry, shard=shard))
                for geometry, shard in zip(self.geometries, shards, strict=True)
            ]
        return self._registered

    def pin(self, hashes: list[bytes], floor: Tier, ttl_s: float) -> int:
        """Pin a chain in every namespace that keeps whole chains; return how many blocks all of them pin."""
        kinds = zip(self.kinds, self.namespaces(), strict=True)
        whole = [namespace for kind, namespace in kinds if not kind.window_tokens]
        pins = [self._client.pin(namespace, hashes, ttl_s, floor) for namespace in whole]
        return min((pin.num_blocks for pin in pins), default=0)

    # -------------------------------------------------------------------------------------- fill

    def fill(self, cache: TieredCache, rows: list[list[int]]) -> tuple[int, Counter[Tier]]:
        """Fill an empty cache; return how many tokens it holds now, and how many of them came from where.

        `rows` is [row, token], all of one length.
        """
        block_tokens = self._block_tokens
        limit = whole_blocks(len(rows[0]), block_tokens, self._align_tokens)
        limit = min(limit, self._client.info.max_blocks_per_request)
        chains = [prefix_hashes(self.geometries[0], row[: limit * block_tokens]) for row in rows]
        tiers: dict[int, Tier] = {}
        for _ in range(MAX_TRIES):
            stored = self._lookups(chains, tiers)
            end = resume_point(self.kinds, limit, block_tokens, self._align_tokens, stored)
            if not end:
                break
            states, limit = self._read(cache, chains, end)
            if limit == end:
                self._install(cache, rows, states, end)
                by_tier: Counter[Tier] = Counter()
                for block in set(tiers).intersection(range(end)):  # before all windows, nothing is read
                    by_tier[tiers[block]] += block_tokens
                return end * block_tokens, by_tier
        return 0, Counter()

    def _lookups(self, chains: list[list[bytes]], tiers: dict[int, Tier]) -> Callable[[int, int, int], int]:
        """Return the function that tells `resume_point` what is stored; it notes in `tiers` where."""

        def stored(kind: int, first: int, end: int) -> int:
            namespace = self.namespaces()[kind]
            found = [lookup_after_search(self._client, namespace, chain[first:end]) for chain in chains]
            for block, tier in enumerate(found[0].tiers, first):
                tiers[block] = max(tier, tiers.get(block, tier))
            return min(one.num_available for one in found)

        return stored

    def _read(self, cache: TieredCache, chains: list[list[bytes]], end: int) -> tuple[list[States], int]:
        """Read what resuming after `end` blocks needs; return, per kind, keys and values shaped
        [row, head, token, dim], and how many blocks are really there."""
        found: list[States] = []
        for kind, namespace in zip(self.kinds, self.namespaces(), strict=True):
            first = kind.first_needed(end, self._block_tokens)
            found.append(self._empty_states(kind, len(chains), (end - first) * self._block_tokens))
            for row, chain in enumerate(chains):
                layers = [(keys[row], values[row]) for keys, values in found[-1]]
                for start, stop, blocks in self._pieces(namespace, first, end):
                    # From where the chain begins, so that the daemon can name what another host stored of it.
                    report = self._client.get(
                        namespace,
                        chain[first:stop],
                        blocks,
                        first_block=start - first,
                        session=cache.session,
                        urgency=Urgency.PREFILL,
                    )
                    if report.num_blocks < stop - first:
                        return found, first + report.num_blocks
                    for members, part in self._by_device(kind, blocks):
                        for some, planes in _planes(kind, part, [layers[member] for member in members]):
                            scatter(some, planes, (start - first) * self._block_tokens)
        return found, end

    def _empty_states(self, kind: LayerKind, num_rows: int, num_tokens: int) -> States:
        shape = (num_rows, kind.num_kv_heads, num_tokens)
        dtype = getattr(torch, kind.dtype)
        homes = [self._devices[number] for number in kind.layers]
        return [
            (
                torch.empty((*shape, kind.key_dim), dtype=dtype, device=home),
                torch.empty((*shape, kind.value_dim), dtype=dtype, device=home),
            )
            for home in homes
        ]

    def _install(self, cache: TieredCache, rows: list[list[int]], found: list[States], end: int) -> None:
        """Give every layer the past of the first `end` blocks, as reading them would have left it."""
        num_tokens = end * self._block_tokens
        for kind, states in zip(self.kinds, found, strict=True):
            for number, (keys, values) in zip(kind.layers, states, strict=True):
                layer = cache.layers[number]
                layer.update(keys[..., :0, :], values[..., :0, :])  # no token: it takes dtype and device
                if kind.window_tokens:
                    num_kept = min(kind.window_tokens, num_tokens)
                    keys, values = keys[..., -num_kept:, :], values[..., -num_kept:, :]
                    layer.cumulative_length = num_tokens
                layer.keys, layer.values = keys, values
        cache.ledger = Ledger([row[:num_tokens] for row in rows])
        cache.num_stored_blocks = end
        cache.track(num_tokens)

    # -------------------------------------------------------------------------------------- save

    def save(self, cache: TieredCache, num_tokens: int | None) -> Saved:
        """Write the whole blocks of the first `num_tokens` tokens that are not known to be stored."""
        rows = cache.ledger.rows()
        if why_not := self._objection(cache, rows):
            return Saved(why_not=why_not)
        limit = len(rows[0]) if num_tokens is None else min(num_tokens, len(rows[0]))
        end = limit // self._block_tokens
        chains = [prefix_hashes(self.geometries[0], row[: end * self._block_tokens]) for row in rows]
        outcomes: list[PutOutcome] = []
        with torch.no_grad():
            for kind, namespace in zip(self.kinds, self.namespaces(), strict=True):
                for row, chain in enumerate(chains):
                    write = _Write(kind, namespace, chain, row, cache)
                    outcomes += self._write(write, cache.num_stored_blocks, end)
        num_stored = outcomes.count(PutOutcome.STORED)
        num_deduplicated = outcomes.count(PutOutcome.DEDUPLICATED)
        num_refused = len(outcomes) - num_stored - num_deduplicated
        if not num_refused:
            cache.num_stored_blocks = max(end, cache.num_stored_blocks)
            for tail in cache.tails.values():
                tail.forget_before(end * self._block_tokens)
        return Saved(num_stored, num_deduplicated, num_refused)

    def _objection(self, cache: TieredCache, rows: list[list[int]]) -> str:
        if cache.ledger.spoiled:
            return cache.ledger.spoiled
        if not rows:
            return "nothing was read"
        if cache.digest != self.digest:
            return "the weights have changed"
        if not cache.is_whole():
            return "not all tokens were seen"
        for kind in self.kinds:
            for number in kind.layers:
                keys = cache.layers[number].keys
                if len(keys) != len(rows) or str(keys.dtype) != f"torch.{kind.dtype}":
                    return "another shape than the model's own"
        return ""

    def _write(self, write: "_Write", first: int, end: int) -> list[PutOutcome]:
        """Write blocks `first` to `end` of one row and kind; return what became of each."""
        layers, start_token = write.layers()
        begin = max(first, -(-start_token // self._block_tokens))  # what a window has dropped is not there
        outcomes = self._put(write, layers, start_token, begin, end)
        if outcomes and outcomes[0] is PutOutcome.PARENT_MISSING and begin:
            # Evicted since. A window is a chain of its own; a whole past begins at the beginning.
            begin = begin if write.kind.window_tokens else 0
            outcomes = self._put(write, layers, start_token, begin, end, is_root=True)
        return outcomes

    def _put(
        self, write: "_Write", layers: States, start_token: int, begin: int, end: int, is_root: bool = False
    ) -> list[PutOutcome]:
        outcomes: list[PutOutcome] = []
        for start, stop, blocks in self._pieces(write.namespace, begin, end):
            first_token = start * self._block_tokens - start_token
            for members, part in self._by_device(write.kind, blocks):
                for some, planes in _planes(write.kind, part, [layers[member] for member in members]):
                    gather(planes, first_token, some)
                if part is not blocks:
                    blocks[:, members] = part.cpu()
            is_start = start == 0 or (is_root and start == begin)
            parent = b"" if is_start else write.chain[start - 1]
            report = self._client.put(
                write.namespace, write.chain[start:stop], blocks, parent=parent, session=write.cache.session
            )
            outcomes += report.outcomes
            if not report.complete:
                break
        return outcomes

    # ------------------------------------------------------------------------------------ pieces

    def _pieces(self, namespace: Namespace, first: int, end: int) -> Iterator[tuple[int, int, Any]]:
        """Yield (first block, end block, an array for them in the buffer), in order."""
        geometry = namespace.geometry
        step = whole_bundles(PIECE_BYTES // geometry.block_bytes, geometry)
        wanted = min(step, max(0, end - first)) * geometry.block_bytes
        if len(self._buffer) < wanted:
            self._buffer = torch.zeros(wanted, dtype=torch.uint8)
        for start in range(first, end, step):
            stop = min(start + step, end)
            part = self._buffer[: (stop - start) * geometry.block_bytes]
            yield (
                start,
                stop,
                part.view(getattr(torch, geometry.dtype)).view(shape_of(geometry, stop - start)),
            )

    def _by_device(self, kind: LayerKind, blocks: Any) -> Iterator[tuple[list[int], Any]]:
        """Yield (members of the kind, their blocks on the device where they compute).

        On the host that is `blocks` itself.
        """
        homes = [self._devices[number] for number in kind.layers]
        for home in dict.fromkeys(homes):
            members = [member for member, one in enumerate(homes) if one == home]
            is_all = len(members) == len(homes)
            yield members, (blocks if is_all else blocks[:, members]).to(home)


@dataclass(frozen=True, slots=True)
class _Write:
    """One row of one kind on its way to the daemon."""

    kind: LayerKind
    namespace: Namespace
    chain: list[bytes]
    row: int
    cache: TieredCache

    def layers(self) -> tuple[States, int]:
        """Return (keys, values) of each layer, [head, token, dim], and which token they begin with."""
        row, cache = self.row, self.cache
        if not self.kind.window_tokens:
            layers = [cache.layers[number] for number in self.kind.layers]
            return [(layer.keys[row], layer.values[row]) for layer in layers], 0
        tails = [cache.tails[number] for number in self.kind.layers]
        states = [tail.states() for tail in tails]
        return [(keys[row], values[row]) for keys, values in states], tails[0].first_token


def _planes(kind: LayerKind, blocks: Any, layers: States) -> Iterator[tuple[Any, Sequence[Sequence[Any]]]]:
    """Yield (blocks, planes of each layer) as gather and scatter take them.

    Keys and values of one size are two planes; of different sizes they share one, side by side.
    """
    if kind.key_dim == kind.value_dim:
        yield blocks, layers
    else:
        yield blocks[..., : kind.key_dim], [(keys,) for keys, _ in layers]
        yield blocks[..., kind.key_dim :], [(values,) for _, values in layers]


def _geometry(kind: LayerKind, block_tokens: int, layers_per_group: int) -> Geometry:
    num_layers = len(kind.layers)
    is_alike = kind.key_dim == kind.value_dim
    return Geometry(
        num_layers=num_layers,
        num_kv_heads=kind.num_kv_heads,
        head_dim=kind.key_dim if is_alike else kind.key_dim + kind.value_dim,
        block_tokens=block_tokens,
        dtype=kind.dtype,
        layers_per_group=min(layers_per_group, num_layers) or -(-num_layers // NUM_GROUPS),
        num_planes=2 if is_alike else 1,
    )

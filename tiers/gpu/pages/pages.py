"""Fragments and pages: which bytes of a fragment lie where in a runtime's pages, in columns.

For one layer group the answer has the same shape for every block: a *template* of pieces, each with its
offset in the fragment, its address in page 0, and which page of the block it is in. Computing it once and
adding a page's start per block is all that is left to do per get, without a loop: a 4,096-token prefix in
pages of 16 tokens with heads outermost is two million pieces.

Neighbours are merged twice: inside the template (a page that is contiguous is one piece, whatever its axes
are called), and between blocks (pages in a row, fragments in a row) where a block is one piece.
"""

from typing import NamedTuple

import numpy as np

from ...memory.places import I64
from ..device.contract import Addresses, CopyPieces
from .layouts import PageTable, row_bytes_of


class Template(NamedTuple):
    """The pieces of one fragment, (pieces,) int64 each, in the order of its bytes.

    Or of many fragments with equally many, (fragments, pieces) each."""

    offsets: I64  # in the fragment
    addresses: I64  # in page 0
    pages: I64  # which page of the block, from 0
    lengths: I64  # bytes


class _Stack(NamedTuple):
    """The templates of all layer groups with equally many pieces per fragment."""

    rows: I64  # (groups,) where a group's template is in `templates`, -1 where it is not
    templates: Template  # (groups of the stack, pieces)

    def of(self, groups: I64) -> Template:
        """Return the template of each of `groups`, (n,), all of this stack."""
        rows = self.rows[groups]
        return Template(*(column[rows] for column in self.templates))


class PageIdError(ValueError):
    """A page does not exist, or stands twice where it is written."""


class RegisteredPages:
    """A runtime's pages, ready to be copied to and from. Templates are made when first needed."""

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self._templates: dict[int, Template] = {}
        self._stacks: list[_Stack] = []

    def ids(self, packed: bytes, num_blocks: int, *, is_target: bool) -> I64:
        """Return the page ids in `packed` (uint32, little-endian) as (num_blocks, pages_per_block).

        Raises PageIdError when they are not that many, when one is not a page, or, for a target, when one
        stands twice: two copies would write the same bytes in no order.
        """
        wanted = num_blocks * self.table.pages_per_block
        if len(packed) != 4 * wanted:
            raise PageIdError(f"page_ids has {len(packed)} bytes; {num_blocks} blocks have {wanted} pages")
        ids = np.frombuffer(packed, "<u4").astype(np.int64)
        if wanted and int(ids.max()) >= self.table.layout.num_pages:
            raise PageIdError(f"page {ids.max()} of {self.table.layout.num_pages} pages")
        if is_target and len(np.unique(ids)) != wanted:
            raise PageIdError("a page stands twice among the targets of one get")
        return ids.reshape(num_blocks, self.table.pages_per_block)

    def template(self, group: int) -> Template:
        """Return the pieces of a fragment of layer group `group`."""
        if group not in self._templates:
            self._templates[group] = make_template(self.table, group)
        return self._templates[group]

    def scatter(self, groups: int | I64, fragments: Addresses, ids: I64) -> CopyPieces:
        """Return the copies of `fragments`, (n,) addresses, into pages.

        Fragment i goes to row i of `ids` (n, pages_per_block). `groups`: the layer group of all fragments, or
        of each, (n,)."""
        pages, parts, lengths = self._match(groups, fragments, ids)
        return CopyPieces(parts, pages, lengths)

    def gather(self, groups: int | I64, fragments: Addresses, ids: I64) -> CopyPieces:
        """Return the copies of pages into `fragments` (n,), with the arguments of `scatter`."""
        pages, parts, lengths = self._match(groups, fragments, ids)
        return CopyPieces(pages, parts, lengths)

    def _match(self, groups: int | I64, fragments: Addresses, ids: I64) -> tuple[Addresses, Addresses, I64]:
        """Return addresses in pages and in fragments, and lengths, of all pieces, neighbours merged."""
        if isinstance(groups, int):
            return self._fit(self.template(groups), fragments, ids)
        self._stacks = self._stacks or self._make_stacks()
        found = []
        for stack in self._stacks:
            rows = slice(None) if len(self._stacks) == 1 else np.flatnonzero(stack.rows[groups] >= 0)
            found.append(self._fit(stack.of(groups[rows]), fragments[rows], ids[rows]))
        if len(found) == 1:
            return found[0]
        pages, parts, lengths = (np.concatenate(columns) for columns in zip(*found, strict=True))
        return pages, parts, lengths

    def _make_stacks(self) -> list[_Stack]:
        """Return the templates of all layer groups, stacked by their numbers of pieces."""
        templates = [self.template(group) for group in range(self.table.geometry.num_groups)]
        counts = np.array([len(template.lengths) for template in templates])
        stacks = []
        for num_pieces in np.unique(counts):
            mine = np.flatnonzero(counts == num_pieces)
            rows = np.full(len(counts), -1, np.int64)
            rows[mine] = np.arange(len(mine))
            columns = zip(*(templates[group] for group in mine), strict=True)
            stacks.append(_Stack(rows, Template(*map(np.stack, columns))))
        return stacks

    def _fit(self, template: Template, fragments: Addresses, ids: I64) -> tuple[Addresses, Addresses, I64]:
        """Return what `_match` does for fragments with equally many pieces each."""
        starts = ids * self.table.layout.page_stride
        if starts.shape[1] > 1:
            shape = (len(starts), template.pages.shape[-1])
            starts = np.take_along_axis(starts, np.broadcast_to(template.pages, shape), 1)
        pages = starts + template.addresses
        lengths = np.broadcast_to(template.lengths, pages.shape).ravel()
        pages = pages.ravel()
        parts = (fragments.view(np.int64)[:, None] + template.offsets).ravel()
        if template.lengths.shape[-1] == 1 and len(lengths) > 1:  # the only way in which blocks can be a run
            first = _starts(pages, parts, lengths)
            pages, parts, lengths = pages[first], parts[first], np.add.reduceat(lengths, first)
        return pages.view(np.uint64), parts.view(np.uint64), lengths


def make_template(table: PageTable, group: int) -> Template:
    """Return the pieces of one fragment of layer group `group`, neighbours merged.

    A portable fragment is layer, plane, token, head; any other is layer after layer as it lies in the page.
    """
    geometry, layout = table.geometry, table.layout
    row_bytes, num_heads, num_tokens = row_bytes_of(geometry), geometry.num_kv_heads, layout.page_tokens
    run_bytes = row_bytes
    if num_heads == 1 or layout.head_stride == row_bytes:  # heads of a token are one run
        run_bytes, num_heads = row_bytes * num_heads, 1
        if num_tokens == 1 or layout.token_stride == run_bytes:  # and so are the tokens of a page
            run_bytes, num_tokens = run_bytes * num_tokens, 1
    layers = geometry.layers_of(group)
    bases = table.bases[layers.start : layers.stop]
    inside = np.arange(num_tokens)[:, None] * layout.token_stride + np.arange(num_heads) * layout.head_stride
    shape = (*bases.shape, table.pages_per_block, *inside.shape)
    addresses = np.broadcast_to(bases[:, :, None, None, None] + inside, shape).ravel()
    pages = np.broadcast_to(np.arange(table.pages_per_block)[:, None, None], shape).ravel()
    offsets = np.arange(len(addresses), dtype=np.int64) * run_bytes
    lengths = np.full(len(addresses), run_bytes, np.int64)
    if not table.is_portable:
        addresses = np.sort(addresses.reshape(len(layers), -1), axis=1).ravel()
    starts = _starts(addresses, offsets, lengths, pages)
    merged = np.add.reduceat(lengths, starts)
    return Template(offsets[starts], addresses[starts], pages[starts], merged)


def _starts(first: I64, second: I64, lengths: I64, parts: I64 | None = None) -> I64:
    """Return which pieces do not simply continue the one before them, on both sides and in the same part."""
    ends = lengths[:-1]
    continues = (first[1:] == first[:-1] + ends) & (second[1:] == second[:-1] + ends)
    if parts is not None:
        continues &= parts[1:] == parts[:-1]
    return np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~continues) + 1))

"""Turns the requests of a trace into paths of pages, without making tokens.

A path names all pages of a request that have KV when it ends, root first, as *items*: an id and a number of pages with
this id. Two pages are equal, with equal page keys, if and only if the paths up to and including them are equal. Equal
adjacent ids are one item, so a path is a prefix of another if their items are equal except the last one, which may be
shorter.

    a whole block                    one item with the block's id
    a partial last block             an item with its whole pages
    the output                       an item with an id of its own, which begins in the page that the prompt ends in
    a block that continues an output the items of the earlier request, and an item with the other pages

The last line is the rule of `traces.tokens`, which this module follows exactly. If blocks are smaller than pages, a
page has the id of its last block, because the id of a block implies everything before it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import TypeAlias

from hicache.errors import InvalidInput

from ..traces.request import TraceRequest

# Items in the order of the path: id and end of each item, little-endian int64. The end is the number of pages from the
# root to the last page of the item. Ids of blocks are at least 0, those of outputs are negative.
Path: TypeAlias = bytes
ITEM_BYTES = 16
# Ids below this number have a byte each, other known ids an entry of a set, which takes 80 bytes. Public traces number
# their blocks from 0.
_DENSE_IDS = 1 << 26
# The items of one block, as (id, pages).
_Pieces: TypeAlias = tuple[tuple[int, int], ...]


class PathSource:
    """Turns the requests of one trace into paths. REQUIRES: it sees all of them, in the order of the trace.

    Its memory grows by an entry for each distinct block, and by one for each request and each continued block. For one
    thread.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._block_tokens = 0
        # Pages of a block, 0 for blocks smaller than a page.
        self._block_pages = 0
        self._known = _KnownIds()
        # The last request that introduced a block as its last whole one, by block, as a place in these columns: the id
        # of the partial block (-1: none), its tokens, those of it and of the output together, the index in the trace.
        self._tails: dict[int, int] = {}
        self._partials, self._partial_tokens = array("q"), array("q")
        self._lengths, self._indices = array("q"), array("q")
        # The items of blocks that begin with earlier items. For blocks smaller than a page, the id of a page that ends
        # with the block.
        self._inherited: dict[int, _Pieces] = {}

    def take(self, request: TraceRequest) -> Path:
        """Return the path of the next request, and record it for requests that continue it.

        Raises InvalidInput if pages and blocks do not fit into each other, or if the size of blocks changes.
        """
        if request.block_tokens != self._block_tokens:
            self._set_block_tokens(request.block_tokens)
        ids = request.hash_ids
        new = self._known.prefix(ids)
        self._continue(ids, new, request.input_length)
        items = self._prompt(request) if self._block_pages else self._grouped(request)
        pages = request.kv_tokens // self._page_size
        if pages > (items[-1] if items else 0):
            items += (-1 - request.index, pages)
        whole = request.whole_blocks
        if whole > new:
            partial_tokens = request.input_length - whole * self._block_tokens
            self._tails[ids[whole - 1]] = len(self._indices)
            self._partials.append(ids[whole] if partial_tokens else -1)
            self._partial_tokens.append(partial_tokens)
            self._lengths.append(partial_tokens + request.output_length)
            self._indices.append(request.index)
        self._known.add(ids[new:])
        return struct.pack(f"<{len(items)}q", *items)

    def _set_block_tokens(self, size: int) -> None:
        if self._block_tokens:
            raise InvalidInput(
                f"trace: blocks of {self._block_tokens} and of {size} tokens; use a trace with blocks of one size"
            )
        if size % self._page_size and self._page_size % size:
            raise InvalidInput(
                f"page_size {self._page_size} does not fit to blocks of {size} tokens; use a divisor or a multiple of "
                f"{size}"
            )
        self._block_tokens, self._block_pages = size, size // self._page_size

    def _continue(self, ids: tuple[int, ...], new: int, input_length: int) -> None:
        """If the blocks from `new` on continue an output, record the items that they begin with."""
        tail = self._tails.get(ids[new - 1]) if 0 < new < len(ids) else None
        if tail is None:
            return
        size, length = self._block_tokens, self._lengths[tail]
        if input_length < new * size + length:
            return
        output = -1 - self._indices[tail]
        if self._block_pages == 0:
            for block in ids[new : new + length // size]:
                self._inherited[block] = ((output, 1),)
            return
        pages, partial_pages = length // self._page_size, self._partial_tokens[tail] // self._page_size
        pieces = (*_cut(self._pieces(self._partials[tail]), 0, partial_pages), (output, pages - partial_pages))
        for k in range(-(-pages // self._block_pages)):
            first, block = k * self._block_pages, ids[new + k]
            whole = _cut(pieces, first, first + self._block_pages)
            own = self._block_pages - sum(count for _, count in whole)
            self._inherited[block] = (*whole, (block, own)) if own else whole

    def _pieces(self, block: int) -> _Pieces:
        return self._inherited.get(block) or ((block, self._block_pages),)

    def _prompt(self, request: TraceRequest) -> list[int]:
        """Return the items of a prompt, ids and ends by turns. Its blocks have one page or several."""
        items: list[int] = []
        whole, end, last = request.whole_blocks, 0, None
        for block in request.hash_ids[:whole]:
            pieces = self._inherited.get(block)
            if pieces is None and block != last:
                end, last = end + self._block_pages, block
                items += (block, end)
            else:
                end = _append(items, pieces or self._pieces(block), end)
                last = items[-2]
        pages = request.input_length // self._page_size - end
        if pages:
            _append(items, _cut(self._pieces(request.hash_ids[whole]), 0, pages), end)
        return items

    def _grouped(self, request: TraceRequest) -> list[int]:
        """Return the items of a prompt, ids and ends by turns. Its pages have several blocks."""
        items: list[int] = []
        blocks = self._page_size // self._block_tokens
        for end, block in enumerate(request.hash_ids[blocks - 1 : request.whole_blocks : blocks], 1):
            _append(items, self._inherited.get(block) or ((block, 1),), end - 1)
        return items


class _KnownIds:
    """A set of ids, which is small if most ids are."""

    def __init__(self) -> None:
        self._flags = bytearray()
        self._others: set[int] = set()

    def prefix(self, ids: tuple[int, ...]) -> int:
        """Return how many first ids are known."""
        flags, others = self._flags, self._others
        dense = len(flags)
        for i, block in enumerate(ids):
            if not (flags[block] if block < dense else block in others):
                return i
        return len(ids)

    def add(self, ids: tuple[int, ...]) -> None:
        """Add ids that are known from now on."""
        for block in ids:
            if block >= _DENSE_IDS:
                self._others.add(block)
                continue
            if block >= len(self._flags):
                self._flags.extend(bytes(block + 1 - len(self._flags) // 2))
            self._flags[block] = 1


def _append(items: list[int], pieces: Iterable[tuple[int, int]], end: int) -> int:
    """Append pieces to the items of a path that ends at page `end`. Return the new end."""
    for piece, pages in pieces:
        end += pages
        if items and items[-2] == piece:
            items[-1] = end
        else:
            items += (piece, end)
    return end


def _cut(pieces: _Pieces, first: int, end: int) -> _Pieces:
    """Return the pages from `first` to before `end` of pieces."""
    cut, at = [], 0
    for piece, pages in pieces:
        inside = min(end, at + pages) - max(first, at)
        if inside > 0:
            cut.append((piece, inside))
        at += pages
    return tuple(cut)

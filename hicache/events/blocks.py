"""Translates events of pages into events of an engine's blocks, for an engine that supplies the page keys.

Routers index the blocks that the engine itself announces for its device: their hashes, tokens, parents and size. A page
has several of them, and pages that differ only in their last blocks share the first ones. So each block is announced
once per medium, with the first page that brings it, and removed with the last one.

A page whose blocks are unknown counts as one block without tokens, whose hash is the page key. Routers ignore it.

Owned by the reader's thread; no lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from ..errors import InvariantError
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES, split_keys
from .types import EVENT_OVERHEAD_BYTES, BlockLabels, Cleared, Event, Medium, PageBlocks, Removed, Stored

# An engine that supplies page keys has one group of KV caches: a page then has the KV of all layers.
GROUP = 0


class BlocksStored(NamedTuple):
    """Consecutive blocks are now on `medium`.

    `hashes`, `parent`, `tokens` and `extra_keys` are as in `PageBlocks`. `block_tokens` is the size of a block. `keys`
    are the keys of the pages that the run completes, `page_parent` the key of the page before them, None at the start
    of a prompt, and `page_tokens` their size. `hashes` is empty if all blocks of the page were announced before.
    """

    medium: Medium
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: bytes
    block_tokens: int
    extra_keys: tuple[tuple[Any, ...] | None, ...]
    labels: BlockLabels
    keys: tuple[bytes, ...]
    page_parent: bytes | None
    page_tokens: int

    def __repr__(self) -> str:
        return f"BlocksStored({self.medium.value}, {len(self.hashes)} blocks of {self.block_tokens})"

    @property
    def size_bytes(self) -> int:
        return EVENT_OVERHEAD_BYTES + len(self.tokens) + 2 * PAGE_KEY_BYTES * (len(self.hashes) + len(self.keys))


class BlocksRemoved(NamedTuple):
    """The blocks `hashes` and the pages `keys` have left `medium`."""

    medium: Medium
    hashes: tuple[bytes, ...]
    keys: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        return EVENT_OVERHEAD_BYTES + 2 * PAGE_KEY_BYTES * (len(self.hashes) + len(self.keys))


BlockEvent: TypeAlias = BlocksStored | BlocksRemoved | Cleared


class BlockLedger:
    """See the module's docstring. REQUIRES: the events of one `EventReader`, all and in order.

    Invariant, verified by `check`: `_pages` has the pages on each medium and the hashes of their blocks; `_families`
    has the announced blocks, which are those of these pages, by the first block of a page. A family of one page is its
    hashes, a larger one counts the pages of each block. Blocks are chained, so two pages of a family share their first
    blocks, and two pages of different families share none.
    """

    def __init__(self) -> None:
        self._pages: dict[Medium, dict[bytes, bytes]] = {medium: {} for medium in Medium}
        self._families: dict[Medium, dict[bytes, bytes | Counter[bytes]]] = {medium: {} for medium in Medium}

    def translate(self, events: Iterable[Event]) -> Iterator[BlockEvent]:
        """Yield the events of blocks. The ledger changes with each one that is taken."""
        for event in events:
            if isinstance(event, Cleared):
                self._clear()
                yield event
            elif isinstance(event, Stored):
                yield from self._store(event)
            else:
                yield from self._remove(event)

    def withdraw(self) -> Iterator[BlocksRemoved]:
        """Yield the removal of all announced blocks, for a stream that has events of others too: they stay valid."""
        for medium, families in self._families.items():
            hashes = tuple(block for family in families.values() for block in _blocks(family))
            if self._pages[medium]:
                yield BlocksRemoved(medium, hashes, tuple(self._pages[medium]))
        self._clear()

    def _clear(self) -> None:
        for medium in Medium:
            self._pages[medium].clear()
            self._families[medium].clear()

    def _store(self, event: Stored) -> Iterator[BlocksStored]:
        parent, run = event.parent, list[BlocksStored]()
        for number, key in enumerate(event.keys):
            page = event.blocks[number] if event.blocks else None
            if page is None:
                page = PageBlocks(key, parent, b"", (None,))
            self._pages[event.medium][key] = page.hashes
            part = _part(event, page, key, parent, self._enter(event.medium, page.hashes))
            # A run continues with whole pages only: one whose first blocks are announced already begins a new one.
            if run and not _continues(run[-1], part):
                yield _joined(run)
                run = []
            run.append(part)
            parent = key
        yield _joined(run)

    def _remove(self, event: Removed) -> Iterator[BlocksRemoved]:
        pages = self._pages[event.medium]
        hashes, keys = list[bytes](), list[bytes]()
        for key in event.keys:
            if (blocks := pages.pop(key, None)) is not None:
                hashes += split_keys(blocks)[self._leave(event.medium, blocks) :]
                keys.append(key)
        if keys:
            yield BlocksRemoved(event.medium, tuple(hashes), tuple(keys))

    def _enter(self, medium: Medium, hashes: bytes) -> int:
        """Count a page on `medium`. Return how many of its blocks, the first ones, are announced already."""
        families, first = self._families[medium], hashes[:PAGE_KEY_BYTES]
        family = families.get(first)
        if family is None:
            families[first] = hashes
            return 0
        if isinstance(family, bytes):
            family = families[first] = Counter(split_keys(family))
        blocks = split_keys(hashes)
        known = sum(block in family for block in blocks)
        family.update(blocks)
        return known

    def _leave(self, medium: Medium, hashes: bytes) -> int:
        """Count a page less. Return how many of its blocks, the first ones, other pages still have."""
        families, first = self._families[medium], hashes[:PAGE_KEY_BYTES]
        family = families[first]
        if isinstance(family, bytes):
            del families[first]
            return 0
        blocks = split_keys(hashes)
        for block in blocks:
            family[block] -= 1
            if not family[block]:
                del family[block]
        if not family:
            del families[first]
        return sum(block in family for block in blocks)

    def check(self) -> None:
        """Raise InvariantError if the invariant of the class does not hold."""
        for medium, pages in self._pages.items():
            counted = Counter(block for hashes in pages.values() for block in split_keys(hashes))
            found: Counter[bytes] = Counter()
            for family in self._families[medium].values():
                found.update(split_keys(family) if isinstance(family, bytes) else family)
            if counted != found:
                raise InvariantError(f"block ledger: the announced blocks on {medium.value} are not those of its pages")


def _blocks(family: bytes | Counter[bytes]) -> Iterable[bytes]:
    return split_keys(family) if isinstance(family, bytes) else family


def _part(event: Stored, page: PageBlocks, key: bytes, page_parent: bytes | None, known: int) -> BlocksStored:
    """Return the event of one page without its first `known` blocks."""
    hashes = split_keys(page.hashes)
    size = event.page_size // len(hashes)
    parent = hashes[known - 1] if known else page.parent
    return BlocksStored(
        event.medium, tuple(hashes[known:]), parent, page.tokens[known * size * TOKEN_BYTES :], size,
        page.extra_keys[known:], page.labels, (key,), page_parent, event.page_size,
    )


def _continues(before: BlocksStored, part: BlocksStored) -> bool:
    """True if the blocks of `part` follow those of `before` in one event."""
    same = (part.block_tokens, part.labels, bool(part.tokens)) == (
        before.block_tokens, before.labels, bool(before.tokens),
    )
    return same and bool(before.hashes and part.hashes) and part.parent == before.hashes[-1]


def _joined(run: list[BlocksStored]) -> BlocksStored:
    return run[0]._replace(
        hashes=tuple(block for part in run for block in part.hashes), tokens=b"".join(part.tokens for part in run),
        extra_keys=tuple(keys for part in run for keys in part.extra_keys),
        keys=tuple(key for part in run for key in part.keys),
    )

"""The device blocks of a request: blocks of cached pages, and free blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.workers.model import ModelShape


@dataclass(slots=True, eq=False)
class _Kept:
    """A page of the device cache; `users` requests read it now."""

    blocks: list[int]
    users: int = 0


class BlockPool:
    """Allocates blocks 1 to `blocks` - 1 in pages of `blocks_per_page` blocks. Block 0 is padding, as in vLLM.

    With `keeps_pages` the pool is a device cache: whole pages of ended requests stay until their blocks are needed.
    """

    def __init__(self, shape: ModelShape, blocks: int, *, keeps_pages: bool) -> None:
        self._page_tokens, self._page_blocks = shape.page_tokens, shape.blocks_per_page
        # First the odd blocks, then the even ones, so that the blocks of a page are not adjacent.
        order = [*range(1, blocks, 2), *range(2, blocks, 2)]
        pages = len(order) // self._page_blocks
        self._free = [order[page * self._page_blocks :][: self._page_blocks] for page in range(pages)]
        self._keeps_pages = keeps_pages
        self._kept: dict[tuple[int, ...], _Kept] = {}  # key: all tokens up to the end of the page; oldest first

    def cached_pages(self, tokens: Sequence[int]) -> int:
        """Return how many leading whole pages are on the device, without the page of the last token."""
        pages = (len(tokens) - 1) // self._page_tokens
        return next((page for page in range(pages) if self._prefix(tokens, page) not in self._kept), pages)

    def take(self, tokens: Sequence[int], count: int) -> list[int] | None:
        """Return blocks for `count` tokens that begin with `tokens`, cached pages first; None if the pool is full."""
        cached = [self._kept[self._prefix(tokens, page)] for page in range(self.cached_pages(tokens))]
        missing = -(-count // self._page_tokens) - len(cached)
        victims = [prefix for prefix, kept in self._kept.items() if kept.users == 0 and kept not in cached]
        if missing > len(self._free) + len(victims):
            return None
        for prefix in victims[: max(0, missing - len(self._free))]:
            self._free.append(self._kept.pop(prefix).blocks)
        for kept in cached:
            kept.users += 1
        taken, self._free = self._free[:missing], self._free[missing:]
        return [block for blocks in [*(kept.blocks for kept in cached), *taken] for block in blocks]

    def give_back(self, tokens: Sequence[int], blocks: list[int]) -> None:
        """Free the blocks of a request that has computed `tokens`."""
        whole_pages = len(tokens) // self._page_tokens
        size = self._page_blocks
        for page, start in enumerate(range(0, len(blocks), size)):
            own = blocks[start : start + size]
            prefix = self._prefix(tokens, page)
            kept = self._kept.get(prefix) if page < whole_pages else None
            if kept is not None and kept.blocks == own:
                kept.users -= 1
            elif kept is None and page < whole_pages and self._keeps_pages:
                self._kept[prefix] = _Kept(own)
            else:
                self._free.append(own)

    def forget(self) -> None:
        """Forget all pages on the device. REQUIRES: no request has blocks."""
        assert not any(kept.users for kept in self._kept.values())
        self._free += [kept.blocks for kept in self._kept.values()]
        self._kept = {}

    def _prefix(self, tokens: Sequence[int], page: int) -> tuple[int, ...]:
        return tuple(tokens[: (page + 1) * self._page_tokens])

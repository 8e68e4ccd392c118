"""Which device blocks a request has: those of pages that were computed before and are still there, and free ones."""

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
    """Blocks 1 to `blocks` - 1; 0 is padding, as in vLLM. They are handed out as pages of `blocks_per_page` blocks.

    With `keeps_pages` it is a device cache: the whole pages of ended requests stay until their blocks are needed.
    """

    def __init__(self, shape: ModelShape, blocks: int, *, keeps_pages: bool) -> None:
        self._page_tokens, self._page_blocks = shape.page_tokens, shape.blocks_per_page
        # Every other block, then the others: the blocks of a page are apart.
        order = [*range(1, blocks, 2), *range(2, blocks, 2)]
        pages = len(order) // self._page_blocks
        self._free = [order[page * self._page_blocks :][: self._page_blocks] for page in range(pages)]
        self._keeps_pages = keeps_pages
        self._kept: dict[tuple[int, ...], _Kept] = {}  # by all tokens up to the end of the page; the oldest first

    def cached_pages(self, tokens: Sequence[int]) -> int:
        """How many leading whole pages are on the device, without that of the last token."""
        pages = (len(tokens) - 1) // self._page_tokens
        return next((page for page in range(pages) if self._prefix(tokens, page) not in self._kept), pages)

    def take(self, tokens: Sequence[int], count: int) -> list[int] | None:
        """Blocks for `tokens` and more, `count` tokens in all, those of the cached pages first; None: no room now."""
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
        """Take the blocks of a request back, which has computed `tokens`."""
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
        """Nothing is on the device any more. REQUIRES: no request has blocks."""
        assert not any(kept.users for kept in self._kept.values())
        self._free += [kept.blocks for kept in self._kept.values()]
        self._kept = {}

    def _prefix(self, tokens: Sequence[int], page: int) -> tuple[int, ...]:
        return tuple(tokens[: (page + 1) * self._page_tokens])

"""Adaptive eviction from the tree: which nodes a tournament keeps.

One tournament decides for L1 and L2 together: a node is lost only when it leaves both. So an eviction from L1 passes
over a kept node that has no copy on L2, and an eviction from L2 over any kept node.

A shadow has one key for each block of tokens of a prompt: a hash of all tokens up to the end of the block. So shadows
need neither nodes nor page keys, and remember blocks whose nodes were evicted. A request is counted when it begins,
with all blocks of its prompt; the rest after the last whole block counts as a block too. Otherwise the shadows would
hold more than fits, and short prompts, which they would not see, would lose their place to long ones. Equal requests
make equal decisions in every process, as ranks need.

A node is kept with the last block that is whole at its end. If that block ends before the node, as for a short question
after a common system prompt, the node must itself have been reused.
"""

from __future__ import annotations

from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from ..keys import RadixKey
from ..tournament import Tournament
from .node import Node

# While LRU is the best, the shadows see so many requests at once: their memory is then in the processor's caches, which
# halves their time.
_BEGUN_MAX = 8


class AdaptiveEviction:
    """The tournament of a tree whose tiers hold `pages` different pages, in blocks of `block_pages` pages.

    `keeps_host`: False if pages enter L2 at their second use. These pages are already chosen: LRU among them has up to
    1.7 times the hits of LRU among all, which the shadows would not know.
    """

    def __init__(self, page_bytes: int, block_pages: int, pages: int, *, keeps_host: bool = True) -> None:
        self._block_bytes = block_pages * page_bytes
        self._tournament = Tournament(pages // block_pages)
        self.keeps_host = keeps_host
        self._begun: list[list[int]] = []

    def begin(self, key: RadixKey) -> None:
        """Record that a request with this prompt begins."""
        prior = xxh3_64_intdigest(key.seed)
        blocks = list(self._blocks(key.tokens, prior))
        if rest := len(key.tokens) % self._block_bytes:
            blocks.append(xxh3_64_intdigest(key.tokens[-rest:], blocks[-1] if blocks else prior))
        self._begun.append(blocks)
        if len(self._begun) == _BEGUN_MAX:
            self._count()

    def _count(self) -> None:
        for blocks in self._begun:
            self._tournament.use(blocks)
        self._begun.clear()

    def keeps(self, node: Node) -> bool:
        """Return True if `node` should stay in the tree."""
        if self._tournament.is_lru:
            return False
        self._count()
        block, _, is_inside = self._block_of(node)
        return (is_inside or node.hit_count > 1) and self._tournament.keeps(block)

    def _blocks(self, data: bytes, prior: int) -> Iterator[int]:
        size, view = self._block_bytes, memoryview(data)
        for end in range(size, len(data) + 1, size):
            prior = xxh3_64_intdigest(view[end - size : end], prior)
            yield prior

    def _block_of(self, node: Node) -> tuple[int, int, bool]:
        """Return the last whole block up to the end of `node`, the number of key bytes after it, and whether it ends
        inside of `node`. Hashes each node once."""
        unknown: list[Node] = []
        while node.block is None and node.parent is not None:
            unknown.append(node)
            node = node.parent
        found = node.block or (xxh3_64_intdigest(node.page_keys or b""), 0, False)
        for part in reversed(unknown):
            block, rest, _ = found
            data = _before(part, rest) + part.key
            blocks = list(self._blocks(data, block))
            part.block = found = (blocks[-1] if blocks else block, len(data) % self._block_bytes, bool(blocks))
        return found


def _before(node: Node, size: int) -> bytes:
    """Return the last `size` key bytes of the path above `node`."""
    parts: list[bytes] = []
    while size and node.parent is not None:
        node = node.parent
        parts.append(node.key[-size:])
        size -= len(parts[-1])
    return b"".join(reversed(parts))

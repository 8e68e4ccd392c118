"""Adaptive eviction from the tree: which nodes the tournaments of L1 and L2 keep.

A shadow has one key for each block of `BLOCK_TOKENS` tokens of a prompt: a hash of all tokens up to the end of the
block. A node is kept if the block is kept that was last whole at its end. So shadows need neither nodes nor page keys,
remember blocks after their nodes were evicted, and are the same in every process with the same requests, as ranks need.

A request counts when it begins, with all blocks of its prompt, on both tiers: also on one that it did not have to ask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from ..keys import RadixKey
from ..tournament import Tournament
from .node import Node

# Shadows take about 1.3 KB of memory and the scheduler about 5 microseconds for a block on two tiers. Prompts below
# this length, and branches that are shorter, are not told apart.
BLOCK_TOKENS = 512


class AdaptiveEviction:
    """The tournaments of a tree whose tiers have `device_pages` and `host_pages` pages. See the module's docstring."""

    def __init__(self, page_size: int, page_bytes: int, pages: int, *, keeps_host: bool = True) -> None:
        stride = max(1, BLOCK_TOKENS // page_size)
        self._block_bytes = stride * page_bytes
        self._tournament = Tournament(pages // stride)
        self.keeps_host = keeps_host

    def begin(self, key: RadixKey) -> None:
        """Record that a request with this prompt begins."""
        self._tournament.use(list(self._blocks(key.tokens, xxh3_64_intdigest(key.seed))))

    def keeps(self, node: Node) -> bool:
        """Return True if `node` should stay in the tree."""
        return self._tournament.keeps(self._block_of(node))

    def _blocks(self, data: bytes, prior: int) -> Iterator[int]:
        size = self._block_bytes
        for end in range(size, len(data) + 1, size):
            prior = xxh3_64_intdigest(data[end - size : end], prior)
            yield prior

    def _block_of(self, node: Node) -> int:
        """Return the last whole block up to the end of `node`. Hashes each node once."""
        unknown: list[Node] = []
        while node.block is None and node.parent is not None:
            unknown.append(node)
            node = node.parent
        block, rest = node.block or (xxh3_64_intdigest(node.page_keys or b""), 0)
        for part in reversed(unknown):
            data = _before(part, rest) + part.key
            block = deque(self._blocks(data, block), maxlen=1)[0] if len(data) >= self._block_bytes else block
            rest = len(data) % self._block_bytes
            part.block = block, rest
        return block


def _before(node: Node, size: int) -> bytes:
    """Return the last `size` key bytes of the path above `node`."""
    parts: list[bytes] = []
    while size and node.parent is not None:
        node = node.parent
        parts.append(node.key[-size:])
        size -= len(parts[-1])
    return b"".join(reversed(parts))

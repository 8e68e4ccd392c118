"""A router that follows events of blocks, and rejects an event that a router could not use."""

from __future__ import annotations

from collections.abc import Iterable

from hicache.events import Cleared, EventReader, Medium, PageBlocks
from hicache.events.blocks import BlockEvent, BlockLedger, BlocksStored
from hicache.keys import PAGE_KEY_BYTES, TOKEN_BYTES, split_keys

# The hash of the block before, and the tokens.
Block = tuple[bytes | None, bytes]


def blocks_in(page: PageBlocks) -> dict[bytes, Block]:
    """Return the blocks of a page by their hash."""
    hashes = split_keys(page.hashes)
    size = len(page.tokens) // len(hashes)
    parts = [page.tokens[number * size : (number + 1) * size] for number in range(len(hashes))]
    return dict(zip(hashes, zip([page.parent, *hashes], parts, strict=False), strict=True))


class BlockRouter:
    """`on` has the blocks on each medium by their hash. An event that stores a present block, removes an absent one, or
    is incomplete raises AssertionError."""

    def __init__(self) -> None:
        self.on: dict[Medium, dict[bytes, Block]] = {medium: {} for medium in Medium}
        self.ledger = BlockLedger()

    def follow(self, reader: EventReader) -> None:
        """Apply all events of `reader`."""
        while events := reader.drain(100):
            self.apply(self.ledger.translate(events))
            self.ledger.check()

    def apply(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                for blocks in self.on.values():
                    blocks.clear()
            elif isinstance(event, BlocksStored):
                self._store(event)
            else:
                for block in event.hashes:
                    del self.on[event.medium][block]

    def _store(self, event: BlocksStored) -> None:
        size = event.block_tokens * TOKEN_BYTES
        assert len(event.tokens) in (0, size * len(event.hashes))
        assert len(event.extra_keys) == len(event.hashes) and event.page_tokens % event.block_tokens == 0
        assert all(len(block) == PAGE_KEY_BYTES for block in event.hashes)
        parent = event.parent
        for number, block in enumerate(event.hashes):
            assert block not in self.on[event.medium], "announced twice"
            self.on[event.medium][block] = (parent, event.tokens[number * size : (number + 1) * size])
            parent = block

"""The layout of a page of vLLM's blocks, which the scheduler's process and all workers compute identically.

A page is `blocks_per_page` blocks of the engine, of all ranks: one key, one frame, one tag, one I/O. Its payload is

    [rank][block of the page][layer][bytes of the engine]

Ranks with the same bytes, as with the latent of MLA, share one part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError
from ...geometry import PageShape, Piece


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The blocks of one engine: `layer_bytes` of one block in each layer, in order, on each rank.

    `ranks` is the number of tensor-parallel workers, `replicas` how many consecutive ones have the same bytes.
    """

    block_tokens: int
    page_tokens: int
    layer_bytes: tuple[int, ...]
    ranks: int
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.ranks % self.replicas:
            raise ConfigError(f"tensor parallelism: {self.ranks} ranks are not groups of {self.replicas} equal ones")

    @property
    def blocks_per_page(self) -> int:
        """Blocks of the engine in a page."""
        return self.page_tokens // self.block_tokens

    @property
    def parts(self) -> int:
        """Parts of a page; one rank, or several equal ones, copy each of them."""
        return self.ranks // self.replicas

    @property
    def shape(self) -> PageShape:
        return PageShape(
            self.page_tokens,
            tuple(
                Piece(f"rank{rank}.block{block}.layer{layer}", size)
                for rank in range(self.parts)
                for block in range(self.blocks_per_page)
                for layer, size in enumerate(self.layer_bytes)
            ),
        )

    def window(self, rank: int) -> tuple[int, int]:
        """Return the first piece of the part that `rank` copies, and how many pieces it has."""
        pieces = self.blocks_per_page * len(self.layer_bytes)
        return rank // self.replicas * pieces, pieces

    def saves(self, rank: int) -> bool:
        """Return True if `rank` writes its part: the first of ranks with the same bytes does."""
        return rank % self.replicas == 0

"""A window into the frames of a host pool: the pieces of each page that one rank copies.

A page is `blocks_per_page` (k) blocks of an engine. The payload of a frame is in the order

    [rank][block of the page][layer][bytes of the engine]

and a window is one rank of it: k equal runs of pieces, a run for each block. Block i of page p is host block p * k + i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..arguments import instance, whole
from ..errors import InvalidInput
from .host import HostPool


class HostWindow:
    """`pieces` pieces of each page of `host` from piece `first_piece` on (default: to the end), as host blocks.

    Changes nothing; the memory stays the host pool's. Raises InvalidInput for pieces that the pages do not have, and
    for those that are not `blocks_per_page` runs of the same sizes.
    """

    def __init__(
        self, host: HostPool, first_piece: int = 0, pieces: int | None = None, blocks_per_page: int = 1
    ) -> None:
        self.host = instance("host window: host", host, HostPool)
        there = len(host.shape.pieces)
        first = whole("host window: first_piece", first_piece, 0, there - 1)
        count = whole("host window: pieces", there - first if pieces is None else pieces, 1, there - first)
        self.blocks_per_page = whole("host window: blocks_per_page", blocks_per_page, 1, count)
        if count % self.blocks_per_page:
            raise InvalidInput(
                f"host window: {count} pieces are not {self.blocks_per_page} blocks of equally many pieces"
            )
        self._pieces = host.shape.pieces[first : first + count // self.blocks_per_page]
        sizes = [piece.bytes for piece in host.shape.pieces[first : first + count]]
        run = [piece.bytes for piece in self._pieces]
        if sizes != run * self.blocks_per_page:
            raise InvalidInput(
                f"host window: pieces {first} to {first + count - 1} are not {self.blocks_per_page} runs of the same "
                f"sizes; give each block of a page the pieces of the first one, which have {run} bytes"
            )
        self.blocks = host.pages * self.blocks_per_page
        self.block_bytes = sum(run)
        # uint8 [pages, blocks of a page, bytes of a block], a view of the frames.
        self.rows = host.tensor[:, host.piece_slice(first, count)].view(host.pages, self.blocks_per_page, -1)

    def layer_rows(self, layer_bytes: Sequence[int]) -> list[torch.Tensor]:
        """View each layer of the blocks as uint8 `[pages, blocks_per_page, bytes]`.

        `layer_bytes` are the bytes of one block in each layer. Raises InvalidInput unless each layer is a run of whole
        pieces, in order, and together they are all pieces of a block.
        """
        found, end, used = [], 0, 0
        for layer, size in enumerate(layer_bytes):
            begin, first = end, used
            while end - begin < size and used < len(self._pieces):
                end += self._pieces[used].bytes
                used += 1
            if end - begin != size:
                names = ", ".join(piece.name for piece in self._pieces[first:used]) or "none"
                raise InvalidInput(
                    f"host window: layer {layer} has {size} bytes in a block of the engine, but its pieces on the host "
                    f"({names}) have {end - begin}; the shape of a page must list the layers as the engine has them"
                )
            found.append(self.rows[:, :, begin:end])
        if used < len(self._pieces):
            raise InvalidInput(
                f"host window: the engine's {len(layer_bytes)} layers have {end} bytes in a block, the window has "
                f"{self.block_bytes}: piece {self._pieces[used].name} has no layer"
            )
        return found

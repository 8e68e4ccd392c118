"""The bytes that each page must have, derived from its page key and the epoch of its weights.

A test that knows the key of a page therefore knows its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from hicache.geometry import KVGeometry
from hicache.types import Bytes2D, PageIds


class Stamps:
    """The bytes of all pages so far, as rows of `table`, uint8 `[layers, blocks, row, block_bytes]`.

    A run of pages can be compared with memory in one step. For one thread.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        self._geometry = geometry
        self._row_of: dict[tuple[int, bytes], int] = {}
        self.table: Bytes2D = np.empty(
            (geometry.layers, geometry.blocks_per_layer, 64, geometry.block_bytes), dtype=np.uint8
        )

    def rows(self, keys: Sequence[bytes], epoch: int = 0) -> PageIds:
        """Return the rows of pages; create missing rows."""
        row_of, row = self._row_of.get, self._row
        found = [row_of((epoch, key), -1) for key in keys]
        return np.array(
            [row(epoch, key) if known < 0 else known for key, known in zip(keys, found, strict=True)], dtype=np.int32
        )

    def payload(self, key: bytes, epoch: int = 0) -> bytes:
        """Return the bytes of one page in the order of a frame."""
        return hashlib.shake_128(epoch.to_bytes(4, "little") + key).digest(self._geometry.payload_bytes)

    def _row(self, epoch: int, key: bytes) -> int:
        row = self._row_of.get((epoch, key))
        if row is None:
            row = self._row_of[epoch, key] = len(self._row_of)
            if row == self.table.shape[2]:
                self.table = np.concatenate((self.table, np.empty_like(self.table)), axis=2)
            stamp = np.frombuffer(self.payload(key, epoch), dtype=np.uint8)
            self.table[:, :, row] = stamp.reshape(self.table.shape[0], self.table.shape[1], -1)
        return row

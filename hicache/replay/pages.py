"""Bytes of pages, as a function of their page key: what a replay writes instead of KV, and compares.

A page is seen as 8-byte words. Word j of the page with key k is the first 8 bytes of k, xor a constant of j. Keys are
SHA-256 digests and the constants are all different, so a word of another page, at another place, of another layer, or
left over from before is equal by chance only once in 2**64: a page that is swapped, shifted, stale, torn or half
copied is found in each of its words, at the price of one xor per word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..errors import InvalidInput
from ..tiers import KVPool
from ..types import PageIds
from .tokens import mixed

WORD_BYTES = 8
# One 8-byte seed per page, int64: the start of its key.
Seeds: TypeAlias = npt.NDArray[np.int64]


def page_seeds(keys: Sequence[bytes]) -> Seeds:
    """The seeds of pages from their keys."""
    return np.frombuffer(b"".join(key[:WORD_BYTES] for key in keys), np.int64)


class Expected(NamedTuple):
    """Pages and their seeds on the pool's device, as `PageBytes.expected` puts them there."""

    rows: torch.Tensor  # int64 [pages]
    words: torch.Tensor  # int64 [pages, 1]


class PageBytes:
    """Fills and compares pages of one L1 pool, on the pool's device. Holds no state but constants.

    REQUIRES: a pool of our own. Raises InvalidInput for a geometry whose layers are not whole words.
    """

    def __init__(self, pool: KVPool) -> None:
        geometry = pool.geometry
        if geometry.layer_bytes % WORD_BYTES:
            raise InvalidInput(f"replay: layers of {geometry.layer_bytes} bytes are not a multiple of {WORD_BYTES}")
        self._device = pool.device
        # Int64 [pages + 1, words] for each layer: our own pools have one region per layer.
        self._layers = [region.view(torch.int64) for (region,) in pool.blocks.layers]
        numbers = np.arange(1, geometry.payload_bytes // WORD_BYTES + 1, dtype=np.uint64)
        constants = mixed(numbers).view(np.int64).reshape(geometry.layers, -1)
        self._constants = torch.from_numpy(constants).to(self._device)
        self.layers = geometry.layers
        self.page_bytes = geometry.payload_bytes

    def fill(self, pages: PageIds, seeds: Seeds) -> None:
        """Write `pages` as a forward would. On a stream device this queues work on the current stream."""
        if len(pages) == 0:
            return
        rows, words = self.expected(pages, seeds)
        for layer, constants in zip(self._layers, self._constants, strict=True):
            layer.index_copy_(0, rows, words ^ constants)

    def fence(self) -> torch.cuda.Event | None:
        """The point behind all that `fill` has queued; None on the CPU, where it writes before it returns."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def expected(self, pages: PageIds, seeds: Seeds) -> Expected:
        """What `wrong_bytes` compares with, converted and brought to the device once for all layers."""
        rows = torch.from_numpy(pages.astype(np.int64)).to(self._device)
        return Expected(rows, torch.from_numpy(seeds.reshape(-1, 1).copy()).to(self._device))

    def wrong_bytes(self, layer: int, pages: Expected) -> npt.NDArray[np.int64]:
        """How many bytes of `layer` differ in each page, int64 `[pages]`. Waits for the device."""
        rows, words = pages
        found, expected = self._layers[layer].index_select(0, rows), words ^ self._constants[layer]
        if torch.equal(found, expected):
            return np.zeros(len(rows), np.int64)
        counts: npt.NDArray[np.int64] = (found.view(torch.uint8) != expected.view(torch.uint8)).sum(dim=1).cpu().numpy()
        return counts

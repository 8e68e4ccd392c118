"""Stores that serve wrong bytes with valid seals. A replay must detect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.calls import Call
from hicache.frame import HEADER_BYTES, FrameCodec, unseal
from hicache_lab.conformance import memory_store
from tests.passing import Passing


class MemoryStorage(Passing):
    """An empty store in memory."""

    def __init__(self, codec: FrameCodec) -> None:
        super().__init__(memory_store(codec))


class FlippingBackend(MemoryStorage):
    """Flips one bit of each page before sealing."""

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[Any], parent: bytes | None
    ) -> list[SetOutcome]:
        changed = [memoryview(bytearray(frame)) for frame in pages]
        for frame in changed:
            unseal(frame)
            frame[HEADER_BYTES + 100] ^= 0x10
        return super()._set(call, keys, changed, parent)


class SwappingBackend(MemoryStorage):
    """Returns the first page of a batch in place of each page, under the seal of the requested page."""

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[Any]) -> list[GetOutcome]:
        outcomes = super()._get(call, keys, pages)
        for frame in pages[1:]:
            frame[HEADER_BYTES:] = pages[0][HEADER_BYTES:]
        return outcomes

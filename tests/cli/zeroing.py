"""A storage backend that returns zeros under a valid seal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hicache.backends.base import GetOutcome
from hicache.backends.file import FileBackend
from hicache.config import FileStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec, unseal


class ZeroingBackend(FileBackend):
    """A backend for negative controls. No tag can detect its zeros; only the comparison of tokens can."""

    def __init__(self, codec: FrameCodec, path: str) -> None:
        super().__init__(codec, FileStorageOptions(path=Path(path), capacity=1 << 30, free_space_floor=0))

    def batch_get(self, keys: Sequence[bytes], pages: Sequence[Any], *, deadline: float) -> list[GetOutcome]:
        """Read, then zero every payload and seal it again."""
        outcomes = super().batch_get(keys, pages, deadline=deadline)
        for key, frame in zip(keys, pages, strict=True):
            frame[HEADER_BYTES:] = bytes(len(frame) - HEADER_BYTES)
            unseal(frame)
            self.codec.seal(key, frame)
        return outcomes

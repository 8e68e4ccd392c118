"""A store that returns zeros under a valid seal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hicache.backends.file import FileDriver
from hicache.backends.pages import PageReads
from hicache.config import FileStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec, unseal


class ZeroingDriver(FileDriver):
    """For negative controls. No tag can detect its zeros; only the comparison of tokens can."""

    def __init__(self, codec: FrameCodec, path: str) -> None:
        super().__init__(codec, FileStorageOptions(path=Path(path), capacity=1 << 30, free_space_floor=0))

    def read(self, pages: PageReads[Any]) -> None:
        """Read, then zero every payload and seal it again."""
        super().read(pages)
        for key, frame in zip(pages.keys, pages.pages, strict=True):
            assert isinstance(frame, memoryview)
            frame[HEADER_BYTES:] = bytes(len(frame) - HEADER_BYTES)
            unseal(frame)
            pages.codec.seal(key, frame)

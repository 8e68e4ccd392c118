"""Stores of another package that do what `hicache doctor` must report, or cope with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.file import FileBackend
from hicache.backends.memory import MemoryBackend
from hicache.config import FileStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec, PageBuffer
from tests.waiting import wait_for


class PausingStore(FileBackend):
    """A file store whose writes end once the file `go` is in `folder`. It makes the file `stored` after the first."""

    def __init__(self, codec: FrameCodec, path: str, folder: str) -> None:
        super().__init__(codec, FileStorageOptions(path=Path(path), free_space_floor=0))
        self._folder = Path(folder)

    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See StorageBackend."""
        outcomes = super().batch_set(keys, pages, parent=parent, deadline=deadline)
        (self._folder / "stored").touch()
        wait_for((self._folder / "go").exists)
        return outcomes


class HangingStore(MemoryBackend):
    """A store that does not open, and does not fail either."""

    def __init__(self, codec: FrameCodec) -> None:
        super().__init__(codec)
        threading.Event().wait()


class RaisingStore(MemoryBackend):
    """A store that raises what no store may raise."""

    def __init__(self, codec: FrameCodec) -> None:
        raise KeyError("odd")


class LyingStore(MemoryBackend):
    """A store that changes a byte of each page that it has read."""

    def batch_get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend."""
        outcomes = super().batch_get(keys, pages, deadline=deadline)
        for page in pages:
            assert isinstance(page, memoryview)
            page[HEADER_BYTES] ^= 1
        return outcomes


class KeepingStore(MemoryBackend):
    """A store that does not remove pages."""

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend."""
        return 0

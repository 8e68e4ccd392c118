"""Stores of another package that do what `hicache doctor` must report, or cope with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from hicache.backends.file import FileDriver
from hicache.backends.memory import MemoryDriver
from hicache.backends.pages import PageReads, PageWrites
from hicache.config import FileStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec
from tests.waiting import wait_for


class PausingStore(FileDriver):
    """A file store whose writes end once the file `go` is in `folder`. It makes the file `stored` after the first."""

    def __init__(self, codec: FrameCodec, path: str, folder: str) -> None:
        super().__init__(codec, FileStorageOptions(path=Path(path), free_space_floor=0))
        self._folder = Path(folder)

    def write(self, pages: PageWrites) -> None:
        """See Driver."""
        super().write(pages)
        (self._folder / "stored").touch()
        wait_for((self._folder / "go").exists)


class HangingStore(MemoryDriver):
    """A store that does not open, and does not fail either."""

    def __init__(self, codec: FrameCodec) -> None:
        super().__init__()
        threading.Event().wait()


class RaisingStore(MemoryDriver):
    """A store that raises what no store may raise."""

    def __init__(self, codec: FrameCodec) -> None:
        raise KeyError("odd")


class LyingStore(MemoryDriver):
    """A store that changes a byte of each page that it has read."""

    def __init__(self, codec: FrameCodec) -> None:
        super().__init__()

    def read(self, pages: PageReads[bytes]) -> None:
        """See Driver."""
        super().read(pages)
        for page in pages.pages:
            assert isinstance(page, memoryview)
            page[HEADER_BYTES] ^= 1


class KeepingStore(MemoryDriver):
    """A store that does not remove pages."""

    def __init__(self, codec: FrameCodec) -> None:
        super().__init__()

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[bytes] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver."""
        return 0, ()

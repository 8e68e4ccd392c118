"""The pages of one namespace in the pool: verified when they enter, copied when they are read."""

from __future__ import annotations

from ..frame import NO_PARENT, Damage, FrameCodec, PageBuffer, PageView, header_of
from ..frame.header import PARENT
from .pool import DaemonPool, PooledPage
from .units import copy_buffers


def parent_of(page: PageBuffer) -> bytes | None:
    """Return the parent in the header of a page."""
    parent = bytes(header_of(page)[PARENT])
    return None if parent == NO_PARENT else parent


class VerifiedPages:
    """One namespace of a pool, for pages of `codec`. `space` is for the methods of `pool`. Thread-safe.

    A page enters as a copy, and the copy is verified, so later writes of its owner to the frame are never served to
    others. In the pool each page has a tag; pages of a codec that compresses or encrypts get one when they enter.
    """

    def __init__(self, codec: FrameCodec, pool: DaemonPool, label: str) -> None:
        self.pool = pool
        self.space = pool.open(codec.namespace, codec.payload_bytes, label)
        self._codec = codec
        # The codec of pages in frames and in the pool: without compression and encryption.
        self._plain = codec
        if codec.transforms:
            self._plain = FrameCodec(codec.namespace, codec.payload_bytes, clock=codec.clock)
        self._padding = memoryview(bytes(codec.frame_bytes - self.space.page_bytes))

    def admit(
        self, key: bytes, page: PageBuffer, parent: bytes | None, *, since: int, deletions: int, is_wanted: bool
    ) -> PooledPage | None:
        """Copy a page into the pool if it may enter. Return it held, to be released. See `DaemonPool.reserve`."""
        entry = self.pool.reserve(self.space, key, since=since, deletions=deletions, is_wanted=is_wanted)
        if entry is None or not self.fill(entry, page, parent):
            return None
        entry.loss = None
        return entry if self.pool.publish(self.space, entry, holders=1) else None

    def fill(self, entry: PooledPage, page: PageBuffer, parent: bytes | None) -> bool:
        """Copy a page to its memory in the pool and verify it there. Free it and return False if it is damaged."""
        is_verified = False
        try:
            copy_buffers(self._buffers(page), [*entry.buffers, self._codec.buffers(entry.view())[-1]])
            is_verified = self._is_verified(entry.key, entry.view(), parent)
        finally:
            if not is_verified:
                self.pool.abandon(self.space, entry)
        return is_verified

    def copy(self, key: bytes, source: PageBuffer, target: PageBuffer) -> bool:
        """Copy the page `key` from one client's buffer to another's and verify it; return False if it is damaged."""
        copy_buffers(self._buffers(source), self._codec.buffers(target))
        return self._is_verified(key, target, parent_of(target))

    def copy_out(self, entry: PooledPage, page: PageBuffer) -> None:
        """Copy a held page of the pool into the buffer of a reader."""
        copy_buffers([*entry.buffers, self._padding], self._codec.buffers(page))

    def _buffers(self, page: PageBuffer) -> list[memoryview]:
        return [page.header, *page.parts, self._padding] if isinstance(page, PageView) else [page]

    def _is_verified(self, key: bytes, page: PageBuffer, parent: bytes | None) -> bool:
        """Return True if a copied page has a valid tag. A page without a tag of its codec, such as a compressed or
        encrypted one after a read, is trusted and gets one."""
        damage = self._plain.accept(key, page, self._codec.frame_bytes)
        if damage is None or damage is Damage.TAG:
            return damage is None
        self._plain.seal_buffers(key, page, parent=parent)
        return True

"""The bytes of a page that is being evicted: an open file outlives its name, so they can be read after the transaction
that removes it, at the price of blocks on the disk that are freed a little later."""

from __future__ import annotations

import errno
import stat

from .pages import READ_FLAGS, System


class EvictedFile:
    """An EvictedPage that holds one descriptor. Raises OSError from the constructor, also for what is no page file."""

    def __init__(self, system: System, root_fd: int, name: str) -> None:
        self._system = system
        self._fd = system.open(name, READ_FLAGS, dir_fd=root_fd)
        try:
            found = system.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "what lies at the name of the page is no regular file")
        except OSError:
            self.close()
            raise
        self._bytes = found.st_size

    @property
    def stored_bytes(self) -> int:
        """See EvictedPage."""
        return self._bytes

    def read(self, frame: memoryview) -> None:
        """See EvictedPage."""
        done = 0
        while done < self._bytes:
            count = self._system.preadv(self._fd, frame[done : self._bytes], done)
            if not count:
                raise OSError(errno.EIO, "the evicted page was cut short meanwhile")
            done += count

    def close(self) -> None:
        """See EvictedPage."""
        self._system.close(self._fd)

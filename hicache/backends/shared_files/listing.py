"""Lists a shared store, and removes what dead writers have left: old temporary files, and directories without pages.

Names that are not those of pages are skipped. A directory or file that vanishes during the listing is skipped too:
other engines remove pages at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence

from ...clock import Clock
from ..base import StoredPage
from ..file.pages import NOT_REGULAR, identity, is_hex
from ..file.reconcile import remove_empty
from ..file.system import LIST_FLAGS, System
from .lease import TEMPORARY_LEASE
from .root import Root, RootLost

# A writer ends its work at a deadline of seconds. An hour also allows for clocks that differ.
LEFTOVER_AGE_S = 3600.0
# Leftovers that one sweep removes.
_LEFTOVERS_MAX = 10_000
# The file or directory was removed, or is a link; or only this one cannot be read.
_OF_ONE_FILE = frozenset({
    errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP, errno.EIO, errno.EUCLEAN, errno.EACCES,
})


@contextlib.contextmanager
def _one_file(besides: frozenset[int] = frozenset()) -> Iterator[None]:
    """Suppress the errors of one file or directory, except for those `besides`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RootLost) or error.errno not in _OF_ONE_FILE - besides:
            raise


class Listing:
    """See the module's docstring. A listing on another thread may make `tidy` miss leftovers, which the next one finds
    again. All functions block and raise OSError."""

    def __init__(self, system: System, root: Root, clock: Clock) -> None:
        self._system = system
        self._root = root
        self._clock = clock
        self.temporary_bytes = 0  # of all temporary files in the last listing
        self._temporaries: list[str] = []
        self._unused: list[str] = []

    def pages(self, prefix: str) -> Iterator[StoredPage]:
        """Yield all pages of the namespaces whose digest starts with `prefix` in hexadecimal. Holds the names of one
        directory of pages."""
        self._temporaries, self._unused, self.temporary_bytes = [], [], 0
        names = self._root.call(self._system.listdir, self._root.fd)
        for name in names:
            if name.startswith(TEMPORARY_LEASE):
                with _one_file():
                    self._note_temporary(name, self._system.lstat(name, dir_fd=self._root.fd))
        for namespace in sorted(name for name in names if is_hex(name, 64) and name.startswith(prefix)):
            count = 0
            for fan, _ in self._entries(namespace, lambda name: is_hex(name, 2)):
                for page in self._pages_in(namespace, fan):
                    count += 1
                    yield page
            if not count:
                self._unused.append(namespace)

    def _pages_in(self, namespace: str, fan: str) -> Iterator[StoredPage]:
        folder = f"{namespace}/{fan}"
        for name, found in self._entries(folder, lambda name: name.lstrip(".").startswith(fan)):
            if is_hex(name, 64):
                is_file = stat.S_ISREG(found.st_mode)
                size_bytes, damage = (found.st_size, None) if is_file else (0, NOT_REGULAR)
                key = bytes.fromhex(name)
                yield StoredPage(bytes.fromhex(namespace), key, size_bytes, found.st_mtime, identity(found), damage)
            elif name.startswith(".") and is_hex(name[1:65], 64) and name[65:66] == ".":
                self.temporary_bytes += found.st_size
                self._note_temporary(f"{folder}/{name}", found)

    def _note_temporary(self, name: str, found: os.stat_result) -> None:
        """Note a temporary file of a dead writer or owner of the lease for `tidy`."""
        if found.st_mtime < self._clock.wall_s() - LEFTOVER_AGE_S and len(self._temporaries) < _LEFTOVERS_MAX:
            self._temporaries.append(name)

    def _entries(self, folder: str, is_wanted: Callable[[str], bool]) -> Sequence[tuple[str, os.stat_result]]:
        """Return the wanted names in a directory, sorted, with their states; none if the directory is gone."""
        system = self._system
        # First, ESTALE may be about the directory: then it is opened again. After that, only about the file.
        tries = iter([frozenset({errno.ESTALE}), frozenset[int]()])

        def read() -> list[tuple[str, os.stat_result]]:
            raised = next(tries)
            with system.opened(folder, LIST_FLAGS, dir_fd=self._root.fd) as fd:
                found: list[tuple[str, os.stat_result]] = []
                for name in sorted(filter(is_wanted, system.listdir(fd))):
                    with _one_file(besides=raised):
                        found.append((name, system.lstat(name, dir_fd=fd)))
                return found

        entries: Sequence[tuple[str, os.stat_result]] = []
        with _one_file():
            entries = self._root.call(read)
        return entries

    def tidy(self) -> None:
        """Remove the leftovers that the last listing has found: temporary files, and the directories of namespaces that
        had no pages. Both only if they are older than an hour."""
        system, root_fd = self._system, self._root.fd
        for temporary in self._temporaries:
            with _one_file():
                system.unlink(temporary, dir_fd=root_fd)
        for namespace in self._unused:
            with _one_file():
                if system.lstat(namespace, dir_fd=root_fd).st_mtime < self._clock.wall_s() - LEFTOVER_AGE_S:
                    remove_empty(system, root_fd, namespace)
        self._temporaries, self._unused = [], []

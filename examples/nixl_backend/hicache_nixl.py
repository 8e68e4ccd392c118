"""A store that keeps pages of HiCache in files, which a file plug-in of NIXL reads and writes.

    <path>/<namespace, 64 hex>/<first 2 hex of the key>/<key, 64 hex>    one encoded page
    <path>/tmp/<random>                                                  a page that is being written

A page is written to a temporary file, which is renamed when it is complete. The access time of a file is set to the
last use of its page. Up to 32 pages are moved in one transfer. A fault of one file fails the whole transfer: its pages
are then moved one by one. A call waits for its transfer, also after the deadline, and then starts no further one.

Locking design: the driver has no mutable state.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

from hicache_nixl_transfers import Move, Transfers

from hicache.backends.base import StoredPage, Usage
from hicache.backends.errors import StoreError
from hicache.backends.pages import PageReads, PageWrites
from hicache.errors import BackendUnavailable
from hicache.frame import FrameCodec

Identity: TypeAlias = tuple[int, int, int]
_identity = attrgetter("st_ino", "st_size", "st_mtime_ns")

_TRANSFER_PAGES_MAX = 32  # limits how long a call lasts after its deadline
_LEFTOVER_S = 3600.0  # a temporary file of this age belongs to a process that was killed
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Translate an error of the operating system, which ends the call."""
    try:
        yield
    except OSError as error:
        raise StoreError(errno.errorcode.get(error.errno or 0, "EIO")) from error


class NixlDriver:
    """See the module's docstring, and `Driver` for each function. `plugin` is the name of a file plug-in, `params` are
    its parameters. Raises ConfigError for an unsuitable plug-in, BackendUnavailable if it or `path` cannot be opened.
    """

    def __init__(
        self, codec: FrameCodec | None, path: str, plugin: str = "POSIX", params: Mapping[str, object] | None = None
    ) -> None:
        del codec  # pages of any size have room
        self.transfers = Transfers(plugin, params or {})
        self._root, self._tmp = Path(path).absolute(), Path(path).absolute() / "tmp"
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._tmp.mkdir(exist_ok=True)
            for leftover in self._tmp.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if leftover.stat().st_mtime < time.time() - _LEFTOVER_S:
                        leftover.unlink()
        except OSError as error:
            raise BackendUnavailable(f"nixl store {path!r}: {error}; check path and permissions") from error

    def _file(self, namespace: bytes, key: bytes) -> Path:
        return self._root / namespace.hex() / key.hex()[:2] / key.hex()

    def _move(self, operation: str, moves: Mapping[int, Move], pages: PageReads[Identity] | PageWrites) -> list[int]:
        """Move pages, and report those that fail. Return the positions of the others."""
        if not moves or self.transfers.move(operation, moves.values()):
            return list(moves)
        if len(moves) > 1 and not pages.is_late:
            return [at for one in moves.items() for at in self._move(operation, dict([one]), pages)]
        for at in moves:
            pages.fail(at, "nixl_transfer")
        return []

    @_os_errors()
    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Driver."""
        return [self._file(namespace, key).exists() for key in keys]

    @_os_errors()
    def read(self, pages: PageReads[Identity]) -> None:
        """See Driver. A file that does not have the size of a page is damaged."""
        positions = iter(pages)
        while some := list(itertools.islice(positions, _TRANSFER_PAGES_MAX)):
            moves, found = dict[int, Move](), dict[int, Identity]()
            with contextlib.ExitStack() as opened:
                for at in some:
                    try:
                        fd = os.open(self._file(pages.codec.namespace, pages.keys[at]), _READ_FLAGS)
                    except FileNotFoundError:
                        pages.miss(at)
                        continue
                    opened.callback(os.close, fd)
                    _, size, _ = found[at] = _identity(os.fstat(fd))
                    if pages.fits(size):
                        moves[at] = pages.frame(at)[:size], fd
                    else:
                        pages.accept(at, size, found[at])  # records the damage
                for at in self._move("READ", moves, pages):
                    _, size, modified_ns = found[at]
                    if pages.accept(at, size, found[at]):
                        with contextlib.suppress(PermissionError):  # another user's file
                            os.utime(moves[at][1], ns=(time.time_ns(), modified_ns))

    @_os_errors()
    def write(self, pages: PageWrites) -> None:
        """See Driver. Allocates the space of a page before its transfer, so a full disk rejects one page."""
        positions = iter(pages)
        while some := list(itertools.islice(positions, _TRANSFER_PAGES_MAX)):
            moves, paths = dict[int, Move](), dict[int, Path]()
            with contextlib.ExitStack() as opened:
                for at in some:
                    if self._file(pages.codec.namespace, pages.keys[at]).exists():
                        pages.present(at)
                        continue
                    buffer, paths[at] = pages.sealed_frame(at), self._tmp / secrets.token_hex(16)
                    fd = os.open(paths[at], _CREATE_FLAGS, 0o600)
                    opened.callback(paths[at].unlink, missing_ok=True)
                    opened.callback(os.close, fd)
                    try:
                        os.posix_fallocate(fd, 0, buffer.nbytes)
                    except OSError as error:
                        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                            raise
                        pages.reject(at)
                        break
                    moves[at] = buffer, fd
                for at in self._move("WRITE", moves, pages):
                    if pages.used_s is not None:
                        os.utime(moves[at][1], (pages.used_s, time.time()))
                    target = self._file(pages.codec.namespace, pages.keys[at])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    paths[at].rename(target)
                    pages.stored(at)

    @_os_errors()
    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[Identity] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver. An object that replaces a page between its comparison and its removal is removed too."""
        removed = 0
        for number, path in enumerate(self._file(namespace, key) for key in keys):
            with contextlib.suppress(FileNotFoundError):
                if found is None or _identity(path.lstat()) == found[number]:
                    path.unlink()
                    removed += 1
        return removed, ()

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver."""
        for path in self._root.glob(f"{namespace}*/??/*"):
            name = re.fullmatch("([0-9a-f]{64})/../([0-9a-f]{64})", "/".join(path.parts[-3:]))
            with _os_errors(), contextlib.suppress(FileNotFoundError):
                if name is not None:
                    space, key, status = bytes.fromhex(name[1]), bytes.fromhex(name[2]), path.lstat()
                    yield StoredPage(space, key, status.st_size, status.st_atime, _identity(status))

    @_os_errors()
    def read_start(self, page: StoredPage, bytes_max: int, deadline: float) -> tuple[bytes, Identity] | None:
        """See Inspects. Reads the file without NIXL."""
        with contextlib.suppress(FileNotFoundError), self._file(*page.id).open("rb") as file:
            return file.read(bytes_max), _identity(os.fstat(file.fileno()))
        return None

    def measure(self) -> Usage:
        """See Driver. Lists the whole store."""
        sizes = [page.bytes for page in self.pages("", 0.0)]
        return Usage(len(sizes), sum(sizes), None)

    def close(self) -> None:
        """See Driver. The agent ends with its last call."""
        self._agent = None

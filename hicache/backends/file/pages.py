"""Single pages as files: their names, and how one of them is read, written, published and removed.

A page is stored at `<namespace, 64 hex>/<first 2 hex of the key>/<key, 64 hex>` below the root of its store, and the
file is exactly one encoded page.

A file at a page's name is not trusted: it is opened without following a link and without waiting (a FIFO would block),
and must be a regular file with the size of a page.

The native helper moves a batch of pages in one call, without the interpreter's lock: see `PageFiles.batches`.

Locking design: the only changing field of `PageFiles` is `direct_io`, which only changes from True to False. Pages are
written and read in any threads at the same time; a file store publishes and removes under its lock (see `store`), or
for a `room`. Without a lock, as in a shared directory, a race makes one of the calls fail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from ...frame import Damage, FrameCodec, TagStream, stored_time, without_first
from ...lazy import native
from ..driver import Answer
from ..pages import PageReads, PageWrites
from .system import CREATE_FLAGS, READ_FLAGS, System

TMP_DIR = "tmp"
LOCK_FILE = "lock"
# The disk is full or not writable now: the page is rejected, and the device is not faulty.
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# The errors of open(2) for a symbolic link (with O_NOFOLLOW), a socket, or a device without a driver.
NOT_A_FILE_ERRNOS = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV})

# A piece that stays in the second-level cache until it is hashed. Smaller pieces need more calls: 2 MiB in pieces of
# 1 MiB, 512, 256 and 128 KiB took 196, 202, 212 and 231 us.
_PIECE_BYTES = 1 << 20
_PIECE_ALIGN = 4096
# The most buffers in one call on Linux.
_IOV_MAX = os.sysconf("SC_IOV_MAX")

NOT_REGULAR = "not_regular"
SIZE = Damage.SIZE.value

Identity: TypeAlias = tuple[int, int, int]

# The functions of the native helper, and their outcomes of a page. Positive outcomes are error numbers.
_find, _read, _rename, _write = (native(f"{verb}_page_files") for verb in ("find", "read", "rename", "write"))
DONE, NOT_STARTED, MISSING, UNUSUAL = 0, -1, -2, -3
_NOT_FOUND_OUT = 2
# A piece of work that is worth waking up a thread.
_WORK_BYTES_MIN = 256 << 10


def is_hex(name: str, digits: int) -> bool:
    """Return True for exactly `digits` lower-case hexadecimal digits: a store opens only such names."""
    return len(name) == digits and not name.strip("0123456789abcdef")


def page_name(namespace_hex: str, key: bytes) -> str:
    """Return the name of a page's file, relative to the root. For the first byte of a key alone, return the name of its
    directory."""
    text = key.hex()
    return f"{namespace_hex}/{text[:2]}/{text}" if len(key) > 1 else f"{namespace_hex}/{text}"


def identity(found: os.stat_result) -> Identity:
    """Return a value that distinguishes a file from its replacement."""
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def error_name(error: OSError) -> str:
    """Return `ENOSPC`, `EIO`, ...: the class under which an error of the operating system is counted."""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def read_head(system: System, fd: int, target: memoryview) -> int:
    """Fill `target` from the start of a file. Return the number of bytes read; a shorter file does not fill `target`.
    Raises OSError."""
    done = 0
    while done < target.nbytes and (count := system.preadv(fd, [target[done:]], done)):
        done += count
    return done


def read_start(system: System, root_fd: int | None, name: str, bytes_max: int) -> bytes:
    """Return the first bytes of a file, as many as it has up to `bytes_max`. Raises OSError."""
    with system.opened(name, READ_FLAGS, dir_fd=root_fd) as fd:
        data = memoryview(bytearray(min(bytes_max, system.fstat(fd).st_size)))
        return bytes(data[: read_head(system, fd, data)])


def read_object(system: System, root_fd: int, name: str, bytes_max: int) -> tuple[bytes, Identity | None] | None:
    """Return the first bytes of a file and its identity, None if it is missing; no bytes of what is not a regular file.
    The identity is None if the read ends before the file does. Raises OSError."""
    found = look(system, root_fd, name)
    if found is None or not stat.S_ISREG(found.st_mode):
        return None if found is None else (b"", identity(found))
    data = read_start(system, root_fd, name, bytes_max)
    return data, identity(found) if len(data) == min(bytes_max, found.st_size) else None


def _piece_bytes(size: int) -> int:
    """Return the length of equal pieces of about `_PIECE_BYTES`: 2 MiB and a header are two of them, and not three."""
    return -(-size // max(1, round(size / _PIECE_BYTES)) // _PIECE_ALIGN) * _PIECE_ALIGN


def _pieces(buffers: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Cut `buffers` into lists for one transfer each: of at most `size` bytes and `_IOV_MAX` buffers."""
    piece: list[memoryview] = []
    free = size
    for buffer in buffers:
        start, end = 0, buffer.nbytes
        while start < end:
            if not free or len(piece) == _IOV_MAX:
                yield piece
                piece, free = [], size
            count = min(free, end - start)
            piece.append(buffer if count == end else buffer[start : start + count])
            start += count
            free -= count
    if piece:
        yield piece


class NotThePage(Exception):
    """The file at a page's name is not that page. `found` identifies it. `stays` is True for a directory with files,
    which `remove_damaged` does not remove."""

    def __init__(self, reason: str, found: Identity, *, stays: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.found = found
        self.stays = stays


class PageFiles:
    """Reads and writes the page files of one store: pages of `codec`; of any length if it is None.

    `direct_io` uses O_DIRECT, which needs aligned buffers, and becomes False if the file system rejects it.
    `direct_refused` counts rejections, also for single transfers from buffers that are not aligned.
    """

    def __init__(
        self, root_fd: int, codec: FrameCodec | None, *, system: System, direct_io: bool, sync: bool
    ) -> None:
        self._root_fd = root_fd
        self._fits: Callable[[int], bool] = (lambda length: True) if codec is None else codec.fits
        self.frame_bytes = 0 if codec is None else codec.frame_bytes
        self._has_helper = _read is not None and codec is not None and type(system) is System
        self._system = system
        self._sync = sync
        self.direct_io = direct_io
        self.direct_refused = 0

    def find(self, name: str) -> os.stat_result | None:
        """Return the state of a regular file of a valid size, or None. Raises OSError, except for a missing file."""
        found = look(self._system, self._root_fd, name)
        return found if found is not None and self._fits(found.st_size) and stat.S_ISREG(found.st_mode) else None

    @property
    def batches(self) -> bool:
        """True if the native helper moves pages: not with direct I/O, nor with the system calls of a test."""
        return self._has_helper and not self.direct_io

    def shares(self, positions: Sequence[int], threads: int) -> list[Sequence[int]]:
        """Cut the positions of pages into pieces of work for `threads` threads: one page each without the helper."""
        share = 1
        if self.batches:
            share = max(-(-len(positions) // threads), -(-_WORK_BYTES_MIN // self.frame_bytes))
        return [positions[start : start + share] for start in range(0, len(positions), share)]

    def lookup(self, namespace_hex: str, keys: Sequence[bytes]) -> Iterator[Answer]:
        """Yield for each key whether its page is stored, or the name of an error."""
        found: Sequence[int] = bytes([_NOT_FOUND_OUT]) * len(keys)
        if self._has_helper:
            found = _find(self._root_fd, namespace_hex, list(keys), self.frame_bytes)
        for key, answer in zip(keys, found, strict=True):
            if answer != _NOT_FOUND_OUT:
                yield bool(answer)
                continue
            try:
                yield self.find(page_name(namespace_hex, key)) is not None
            except OSError as error:
                yield error_name(error)

    def read_share(self, pages: PageReads[Identity], positions: Sequence[int], seconds: float) -> list[Any]:
        """Read pages at once, for at most so many seconds. Return for each DONE if it is proven, the identity of a file
        that was read whole and is not, an error number, or another outcome. REQUIRES: `batches`."""
        keys, codec = [pages.keys[position] for position in positions], pages.codec
        buffers = [codec.buffers(pages.pages[position]) for position in positions]
        found: list[Any] = _read(self._root_fd, codec.namespace.hex(), keys, buffers, codec.fields(), seconds)
        return found

    def write_share(
        self, names: list[str], pages: PageWrites, positions: Sequence[int], copied_before_s: int, seconds: float
    ) -> list[tuple[int, int]]:
        """Write pages to new files `names` in `tmp`, with the helper in one call of at most so many seconds. Return for
        each DONE, NOT_STARTED or an error number, and its length. A page that was first stored before
        `copied_before_s`, on another level or in another store, keeps that time."""
        if not self.batches:
            return [
                self._write_page(f"{TMP_DIR}/{name}", pages, position, copied_before_s)
                for name, position in zip(names, positions, strict=True)
            ]
        buffers, keys, parents, fields = pages.sealed_natively(positions)
        written = _write(
            self._root_fd, TMP_DIR, names, buffers, keys, parents, fields, self._sync, copied_before_s, seconds
        )
        if fields is not None:
            return [(outcome, self.frame_bytes) for outcome in written]
        return [(outcome, sum(one.nbytes for one in page)) for outcome, page in zip(written, buffers, strict=True)]

    def _write_page(self, temporary: str, pages: PageWrites, position: int, copied_before_s: int) -> tuple[int, int]:
        # Direct I/O needs aligned memory.
        stored = [pages.sealed_frame(position)] if self.direct_io else pages.sealed(position)
        try:
            self.write(temporary, stored)
            if 0 < (stored_s := stored_time(stored[0])) < copied_before_s:
                self._system.utime(temporary, stored_s * 1_000_000_000, dir_fd=self._root_fd)
        except OSError as error:
            return error.errno or errno.EIO, 0
        return DONE, sum(buffer.nbytes for buffer in stored)

    def publish_some(self, names: list[str], namespace_hex: str, keys: list[bytes]) -> int:
        """Rename files in `tmp` to pages, in order. Return how many were renamed; `publish` renames the next one."""
        renamed: int = _rename(self._root_fd, TMP_DIR, names, namespace_hex, keys) if self._has_helper else 0
        return renamed

    def read(self, name: str, buffers_of: Callable[[int], Sequence[memoryview]], stream: TagStream | None) -> Identity:
        """Read a file into the buffers that `buffers_of` returns for its length, and into `stream`. Return the identity
        of the file, whose last part is its length.

        Raises FileNotFoundError, NotThePage, or OSError. REQUIRES: the buffers together have that length.
        """
        system = self._system
        try:
            fd = self._open(name, READ_FLAGS)
        except OSError as error:
            if error.errno in NOT_A_FILE_ERRNOS and (link := look(system, self._root_fd, name)) is not None:
                raise NotThePage(NOT_REGULAR, identity(link)) from error
            if error.errno == errno.ENOTDIR:
                raise FileNotFoundError(errno.ENOENT, "a directory of the store is missing") from error
            raise
        try:
            found = system.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                is_full = stat.S_ISDIR(found.st_mode) and bool(system.listdir(fd))
                raise NotThePage(NOT_REGULAR, identity(found), stays=is_full)
            size = found.st_size
            if not self._fits(size):
                raise NotThePage(SIZE, identity(found))
            # Through the page cache in pieces, which are hashed while warm; the device is faster with large reads.
            piece_bytes = size if self.direct_io or stream is None else _piece_bytes(size)
            if not self._transfer(system.preadv, fd, buffers_of(size), piece_bytes, stream):
                # Another length than the file's proves nothing about the file.
                raise OSError(errno.EIO, "the read ended before the file does")
        finally:
            system.close(fd)
        return identity(found)

    def _open(self, name: str, flags: int) -> int:
        """Open a file, with direct I/O if it is enabled and the file system supports it."""
        if self.direct_io:
            try:
                return self._system.open(name, flags | os.O_DIRECT, dir_fd=self._root_fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            self.direct_io = False
            self.direct_refused += 1
            if flags & os.O_CREAT:
                # Linux creates the file before it rejects O_DIRECT, so our own empty file may exist.
                with contextlib.suppress(FileNotFoundError):
                    self._system.unlink(name, dir_fd=self._root_fd)
        return self._system.open(name, flags, dir_fd=self._root_fd)

    def _transfer(
        self, call: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview],
        piece_bytes: int, stream: TagStream | None,
    ) -> bool:
        """Read or write a whole page in pieces, and pass each piece to `stream`. Return False if the transfer stops."""
        done = 0
        for piece in _pieces(buffers, piece_bytes):
            left: Sequence[memoryview] = piece
            while left:
                count = self._move(call, fd, left, done)
                if count == 0:
                    return False
                left, done = without_first(left, count), done + count
            if stream is not None:
                for buffer in piece:
                    stream.add(buffer)
        return True

    def _move(
        self, transfer: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview],
        offset: int,
    ) -> int:
        """Return the number of bytes read or written."""
        try:
            return transfer(fd, buffers, offset)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # These buffers, or this device, do not work with direct I/O; the page cache accepts any buffer.
            self.direct_refused += 1
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return transfer(fd, buffers, offset)

    def write(self, temporary: str, stored: Sequence[memoryview]) -> None:
        """Write the buffers `stored` to the new file `temporary`, and to the device if the store is synchronous.

        Raises OSError; the file may then exist, whole or in part.
        """
        fd = self._open(temporary, CREATE_FLAGS)
        try:
            if not self._transfer(self._system.pwritev, fd, stored, sum(buffer.nbytes for buffer in stored), None):
                raise OSError(errno.EIO, "the file system accepted no more bytes and gave no reason")
            if self._sync:
                self._system.fdatasync(fd)
        finally:
            self._system.close(fd)

    def publish(self, temporary: str, name: str) -> None:
        """Rename a written file atomically, replacing an existing one. Raises OSError.

        Creates the page's directories, replacing a link or a file.
        """
        system, root_fd = self._system, self._root_fd
        try:
            return system.rename(temporary, name, dir_fd=root_fd)
        except (FileNotFoundError, NotADirectoryError):
            namespace, fan, _ = name.split("/")
            for folder in (namespace, f"{namespace}/{fan}"):
                make_folder(system, root_fd, folder)
        except (IsADirectoryError, FileExistsError):
            system.rmdir(name, dir_fd=root_fd)
        return system.rename(temporary, name, dir_fd=root_fd)


def make_folder(system: System, root_fd: int, name: str) -> None:
    """Create a directory of the store if it does not exist. Remove a link or a file of that name, but not the link's
    target. Raises OSError."""
    try:
        return system.mkdir(name, dir_fd=root_fd)
    except FileExistsError:
        if stat.S_ISDIR(system.lstat(name, dir_fd=root_fd).st_mode):
            return None
    system.unlink(name, dir_fd=root_fd)
    return system.mkdir(name, dir_fd=root_fd)


def look(system: System, root_fd: int, name: str) -> os.stat_result | None:
    """Return the state of the file of any kind with this name, or None. Raises OSError."""
    try:
        return system.lstat(name, dir_fd=root_fd)
    except (FileNotFoundError, NotADirectoryError):
        return None


def look_for_file(system: System, root_fd: int, name: str) -> os.stat_result | None:
    """As `look`, but None if it is not a regular file."""
    found = look(system, root_fd, name)
    return found if found is not None and stat.S_ISREG(found.st_mode) else None


def file_id(found: os.stat_result) -> tuple[int, int]:
    """Return the device and the number of a file: two names with the same are one file."""
    return (found.st_dev, found.st_ino)


def find_id(system: System, root_fd: int, name: str) -> tuple[int, int] | None:
    """Return the `file_id` of the file of any kind with this name, or None. Raises OSError."""
    found = look(system, root_fd, name)
    return None if found is None else file_id(found)


def remove_page(system: System, root_fd: int, name: str) -> None:
    """Remove a page's file if it exists. REQUIRES: the store's lock. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        system.unlink(name, dir_fd=root_fd)


def remove_temporary(system: System, root_fd: int, name: str) -> None:
    """Remove a file of a store that is not a page, if it exists. Raises OSError."""
    try:
        system.unlink(name, dir_fd=root_fd)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        with contextlib.suppress(OSError):  # a directory with files is not removed
            system.rmdir(name, dir_fd=root_fd)


def remove_damaged(system: System, root_fd: int, name: str, found: Identity) -> bool:
    """Remove the file at a page's name if it is still the damaged one. Return True if it was removed.

    A link, FIFO, socket or device is removed itself, without following it; a directory is removed if it is empty.
    REQUIRES: the store's lock. Raises OSError.
    """
    now = look(system, root_fd, name)
    if now is None or (stat.S_ISREG(now.st_mode) and found != identity(now)):
        return False  # removed, or stored again since
    if not stat.S_ISDIR(now.st_mode):
        remove_page(system, root_fd, name)
        return True
    try:
        system.rmdir(name, dir_fd=root_fd)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True

"""L2 in memory that several processes share: a `HostPool` whose frames are a file in /dev/shm, opened by name.

    hicache.NAME    [ control block, 64 KiB | frame 0 | frame 1 | ... ]     mode 0600

Processes open a name in any order. The first one creates the file and takes all its memory at once; the others wait for
it. With `processes` the name goes away once so many have opened it, and the memory goes when the last of them ends.
Without it (a daemon's pool) the name stays until `unlink`.

Locking design: one process, the scheduler's, uses the allocator; the others get page numbers from it. No lock guards
the bytes of a page: they belong to its holder, as in every host pool. Two kernel locks on the file order the opening:

- `flock`, exclusive, is held while a process creates the file, verifies it, joins it or removes its name.
- Each process that has joined holds a byte-range lock of its open file (`F_OFD_SETLK`) as long as it has the memory
  mapped (the mapping has a duplicate of the descriptor): one byte of `processes` for itself, or byte 0 with the others
  for a pool that is kept. The kernel drops the lock when the process ends in any way, so processes that died are not
  counted.

Under the flock, a file that differs from what is asked for and that no process has joined is a leftover and is
replaced. A file whose creator died is one of them: it is too short, because tmpfs sets the size once all memory is
taken. A leftover that fits is joined.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import stat
import struct
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..arguments import instance, number, whole
from ..errors import CapacityError, InvalidInput, SharedMemoryError
from ..geometry import KVGeometry, PageShape
from .host import HostPool, populate

# Where Linux keeps POSIX shared memory.
_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"[A-Za-z0-9.-]{1,128}")
# A multiple of every page size of Linux, so that the frames can be mapped alone.
CONTROL_BYTES = 64 << 10
# Far above the processes of one node; each is a byte that can be locked.
_PROCESSES_MAX = 1024
# flock has no timeout: how often a process that waits for it tries again.
_RETRY_S = 0.005
# The file does not fit: no space, a quota, a limit of the process, or no memory.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class _Control:
    """The control block: what the file holds. `processes` is 0 for a pool that is kept."""

    processes: int
    pages: int
    frame_bytes: int
    shape: bytes  # SHA-256 of the page's shape
    version: int = 1

    _LAYOUT = struct.Struct("<8sIIQQ32s")
    BYTES = _LAYOUT.size
    _MAGIC = b"hicacheS"

    def pack(self) -> bytes:
        """Return the block as bytes."""
        sizes = (self.version, self.processes, self.pages, self.frame_bytes)
        return self._LAYOUT.pack(self._MAGIC, *sizes, self.shape)

    @classmethod
    def unpack(cls, data: bytes) -> _Control | None:
        """Return what a file begins with, or None if HiCache did not write it."""
        if len(data) < cls.BYTES:
            return None
        magic, version, processes, pages, frame_bytes, shape = cls._LAYOUT.unpack_from(data)
        return cls(processes, pages, frame_bytes, shape, version) if magic == cls._MAGIC else None

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return CONTROL_BYTES + self.pages * self.frame_bytes

    def difference(self, other: _Control, other_bytes: int) -> str | None:
        """Return how another file, `other_bytes` long, differs from this one, or None."""
        if other.version != self.version:
            return f"another version of HiCache made it (format {other.version}, this one has {self.version})"
        if other.pages != self.pages:
            return f"it has {other.pages} pages, and {self.pages} are asked for"
        if other.shape != self.shape or other.frame_bytes != self.frame_bytes:
            return "its pages have another shape"
        if other.processes != self.processes:
            return f"it is for {other.processes or 'any number of'} processes, not {self.processes or 'any number'}"
        if other_bytes != self.file_bytes:
            return f"it has {other_bytes} bytes, not {self.file_bytes}"
        return None


class SharedHostPool(HostPool):
    """Frames of host memory that several processes have mapped, each at an address of its own. See `open`.

    `identity` is equal in two processes if, and only if, they share the memory: compare it before the first copy where
    a process may have been restarted, because the name is free again once all `processes` have opened the pool.
    """

    def __init__(
        self, path: Path, processes: int, deadline: float, shape: PageShape | KVGeometry, pages: int, pin: bool
    ) -> None:
        """Use `open`, which checks the arguments. `deadline` is on the monotonic clock."""
        self.path = path
        self._processes = processes
        self._deadline = deadline
        super().__init__(shape, pages, pin=pin)

    @classmethod
    def open(
        cls,
        name: str,
        shape: PageShape | KVGeometry,
        pages: int,
        *,
        processes: int | None = None,
        pin: bool = False,
        timeout_s: float,
    ) -> SharedHostPool:
        """Open the pool `name`, or create it; blocks until it is ready, at most `timeout_s` seconds (and as long as the
        kernel needs to zero the memory, for the process that creates it).

        `name` is 1 to 128 letters, digits, dashes and dots; use one per engine, so that a restart takes over what a
        crash has left. `processes` is how many open it, this one included; None keeps it until `unlink`. `pin`
        registers the memory with CUDA, in each process that needs it.

        Raises CapacityError if the memory does not fit (then nothing is left of it), SharedMemoryError if the pool has
        other pages than asked for, is not ready in time, or if the path holds a file that HiCache did not create or
        that others may open; InvalidInput for arguments out of range.
        """
        if not _NAME.fullmatch(instance("shared host pool: name", name, str)):
            raise InvalidInput("shared host pool: name: use 1 to 128 letters, digits, dashes and dots")
        members = 0 if processes is None else whole("shared host pool: processes", processes, 1, _PROCESSES_MAX)
        deadline = time.monotonic() + number("shared host pool: timeout_s", timeout_s)
        return cls(
            _FOLDER / f"hicache.{name}", members, deadline, shape, whole("shared host pool: pages", pages, 1), pin
        )

    @property
    def identity(self) -> tuple[int, int]:
        """Which memory this is: device and inode."""
        return self._identity

    def unlink(self) -> None:
        """Remove the name, if it still is this pool's. The memory goes when the last process has unmapped it."""
        with contextlib.suppress(FileNotFoundError):
            state = os.lstat(self.path)
            if (state.st_dev, state.st_ino) == self._identity:
                os.unlink(self.path)

    def _map(self, pages: int) -> mmap.mmap:
        tokens, pieces = self.shape.tokens, [[piece.name, piece.bytes] for piece in self.shape.pieces]
        digest = hashlib.sha256(json.dumps([tokens, pieces]).encode()).digest()
        wanted = _Control(self._processes, pages, self.frame_bytes, digest)
        mapping = None
        while mapping is None:
            descriptor = self._descriptor()
            try:
                mapping = self._join(descriptor, wanted)
            finally:
                if mapping is None:
                    os.close(descriptor)
        state = os.fstat(descriptor)
        self._identity = (state.st_dev, state.st_ino)
        weakref.finalize(self, _leave, descriptor, self.path, bool(self._processes), os.getpid())
        populate(mapping)
        return mapping

    def _descriptor(self) -> int:
        """Return a descriptor of this user's file, or of a new and empty one."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            while True:
                try:
                    self._require_own(os.lstat(self.path))
                    descriptor = os.open(self.path, flags)
                    break
                except FileNotFoundError:
                    with contextlib.suppress(FileExistsError):  # another process was faster
                        descriptor = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600)
                        os.fchmod(descriptor, 0o600)  # the umask may have taken bits away
                        break
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, descriptor)
                self._require_own(os.fstat(descriptor))
                undo.pop_all()
        except SharedMemoryError:
            raise
        except OSError as error:
            raise self._error(f"cannot be opened: {error.strerror}") from error
        return descriptor

    def _require_own(self, state: os.stat_result) -> None:
        if not stat.S_ISREG(state.st_mode):
            raise self._error("is not a regular file; it was left as it is. Choose another name")
        if state.st_uid != os.geteuid():
            raise self._error(f"belongs to user {state.st_uid}, not {os.geteuid()}. Choose another name")
        if stat.S_IMODE(state.st_mode) != 0o600:
            raise self._error(f"has mode {stat.S_IMODE(state.st_mode):04o}, not 0600. Choose another name")

    def _join(self, descriptor: int, wanted: _Control) -> mmap.mmap | None:
        """Create, verify or replace the file and map it. None if its name is gone by now: begin again."""
        with self._flock(descriptor):
            state = os.fstat(descriptor)
            if state.st_nlink == 0:
                return None
            if state.st_size == 0:  # new, or its creator died before it wrote anything
                self._fill(descriptor, wanted)
            else:
                found = _Control.unpack(os.pread(descriptor, _Control.BYTES, 0))
                if found is None:
                    raise self._error("was not created by HiCache; it was left as it is. Choose another name")
                difference = wanted.difference(found, state.st_size)
                if difference is not None:
                    if not _locked(descriptor, 0, _PROCESSES_MAX):
                        os.unlink(self.path)
                        return None
                    raise self._error(f"{difference}. Give all processes the same arguments, or choose another name")
            if not self._take_place(descriptor):
                os.unlink(self.path)  # all have joined, and the last one failed to do so
                return None
            size_bytes = wanted.file_bytes - CONTROL_BYTES
            try:
                return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, offset=CONTROL_BYTES)
            except OSError as error:
                if os.fstat(descriptor).st_nlink and not _locked(descriptor, 0, _PROCESSES_MAX):
                    os.unlink(self.path)
                what = f"{size_bytes} bytes cannot be mapped: {error.strerror}; raise the limits of this process"
                raise CapacityError(f"shared host pool: {self.path}: {what}, or lower host.size") from error

    def _fill(self, descriptor: int, control: _Control) -> None:
        """Write the control block of an empty file and take all memory. The name is removed if that fails."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.path.unlink, missing_ok=True)
            system = os.fstatvfs(descriptor)
            free_bytes = system.f_bavail * system.f_frsize
            if system.f_blocks and control.file_bytes > free_bytes:  # no blocks: a tmpfs without a limit
                raise self._full(control, free_bytes)
            self._require_available(control.pages)
            os.pwrite(descriptor, control.pack(), 0)
            try:
                os.posix_fallocate(descriptor, 0, control.file_bytes)
            except OSError as error:
                raise self._full(control, free_bytes) if error.errno in _FULL else error from error
            undo.pop_all()

    def _take_place(self, descriptor: int) -> bool:
        """Lock a byte for this process; the last one removes the name. False if all bytes are taken."""
        if not self._processes:
            return _lock(descriptor, fcntl.F_RDLCK, 0)
        place = next((at for at in range(self._processes) if _lock(descriptor, fcntl.F_WRLCK, at)), None)
        if place is None:
            return False
        if all(_locked(descriptor, at, 1) for at in range(self._processes) if at != place):
            os.unlink(self.path)
        return True

    @contextlib.contextmanager
    def _flock(self, descriptor: int) -> Iterator[None]:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= self._deadline:
                    message = "is not ready in time: another process still creates it. Raise timeout_s, or end it"
                    raise self._error(message) from None
                time.sleep(_RETRY_S)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _full(self, control: _Control, free_bytes: int) -> CapacityError:
        return CapacityError(
            f"shared host pool: {control.pages} pages of {control.frame_bytes} bytes need {control.file_bytes} bytes "
            f"in {_FOLDER}, but only {free_bytes} are free, or a limit of this process is lower; enlarge it (mount -o "
            "remount,size=..., docker --shm-size), or lower host.size"
        )

    def _error(self, what: str) -> SharedMemoryError:
        return SharedMemoryError(f"shared host pool: {self.path} {what}")


def _leave(descriptor: int, path: Path, last_unlinks: bool, process: int) -> None:
    """Close a pool's file. If a start was given up, the last process of it removes the name."""
    if os.getpid() != process:
        return  # a forked child; the pool is its parent's
    with contextlib.suppress(OSError):  # held: another process is joining, and will be the last
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            if last_unlinks and os.fstat(descriptor).st_nlink and not _locked(descriptor, 0, _PROCESSES_MAX):
                os.unlink(path)
        finally:
            # A late view keeps the mapping, whose duplicate of the descriptor would keep the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


# struct flock of 64-bit Linux: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")


def _lock(descriptor: int, kind: int, at: int) -> bool:
    """Lock byte `at` for this open file. False if another one has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as the system likes
        return False
    return True


def _locked(descriptor: int, first: int, count: int) -> bool:
    """True if another open file has locked one of `count` bytes."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK

"""Shared memory of the processes of one user: a file of page frames in /dev/shm, opened by name.

    hicache.NAME    [ control block, 64 KiB | frame 0 | frame 1 | ... ]     mode 0600

    open      for members: engines and their workers. The first member creates the file and allocates all its memory;
              all other members wait for it. A daemon can create the file for a member.
    attach    for a storage daemon, which maps the file of a member.

With `processes`, the name is removed once that many members have opened it, and the memory is freed when the last of
them ends. Without it the file is persistent: the name remains until `unlink`, and a daemon can attach it.

Locking design: no lock guards the bytes of a page; they belong to its holder. `_MAPPED` changes by single operations,
which are atomic in CPython. Two kernel locks on the file order the opening:

- A process holds the exclusive `flock` while it creates the file, verifies it, joins it or removes its name.
- Each member holds a byte-range lock of its open file (`F_OFD_SETLK`) as long as it has the memory mapped (the mapping
  has a duplicate of the descriptor): one byte of `processes` for itself, or byte 0 together with the other members of a
  persistent file. A daemon holds the byte after these. The kernel releases a lock when the process ends in any way, so
  dead processes are not counted.
  The process that assigns pages to owners can claim the byte after that of the daemons.

Under the flock, a file that no member has joined is a leftover. A leftover that fits is joined; any other is replaced.
A file whose creator died is too short, because tmpfs sets the size after all memory is allocated, so it does not fit. A
daemon that is attached to a leftover may still write to it for the dead member. So `open` waits until the daemon has
detached, and replaces the file at its deadline. A GUEST joins it: the daemon has created or emptied it for this
process.

**Dead memory.** `remove_dead` removes leftovers of all names without `keep`. Every `open` calls it, because only a
process of the same name would replace a leftover, and so do daemons. It needs no list of owners: a file is dead if no
process holds a lock on it, under its flock. The creator of a file holds the flock until it has its byte, so a file that
is being created is not dead.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import logging
import math
import mmap
import os
import re
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from .arguments import instance
from .errors import CapacityError, InvalidInput, SharedMemoryError
from .mapping import address_of, populate
from .numa import bind_file
from .shared_file import RETRY_S, file_error, flock, is_locked, lock_byte, open_file
from .units import format_size

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")  # where Linux keeps POSIX shared memory
_PREFIX = "hicache."
_NAME = re.compile(r"[A-Za-z0-9.-]{1,128}")
# A multiple of every page size of Linux, so that the frames can be mapped without the control block.
CONTROL_BYTES = 64 << 10
# Far above the number of processes of one node; each of them locks one byte.
PROCESSES_MAX = 1024
# The byte that daemons lock, after those of the members.
_ATTACHED = PROCESSES_MAX
# The byte of the process that assigns pages to owners.
_CLAIMED = PROCESSES_MAX + 1
# The file does not fit: no space, a quota, a limit of the process, or no memory.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
_VERSION = 1


class Role(enum.Enum):
    """The role of a process that opens the memory."""

    OWNER = enum.auto()  # a member that creates the file or joins the file of another member
    ALONE = enum.auto()  # like OWNER, but rejects a file that another member has open
    GUEST = enum.auto()  # like ALONE, for a member whose daemon has created the file
    DAEMON = enum.auto()  # creates the file for a guest; not a member


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a file, as in its control block. `processes` is 0 for a persistent file."""

    processes: int
    pages: int
    frame_bytes: int
    shape: bytes  # SHA-256 of the page's shape
    version: int = _VERSION
    keep: bool = False  # the file is not removed when its processes have died

    _PACKED = struct.Struct("<8sIIQQ32s?")
    BYTES = _PACKED.size
    _MAGIC = b"hicacheS"

    def pack(self) -> bytes:
        """Return the control block."""
        sizes = (self.version, self.processes, self.pages, self.frame_bytes)
        return self._PACKED.pack(self._MAGIC, *sizes, self.shape, self.keep)

    @classmethod
    def unpack(cls, data: bytes) -> Layout | None:
        """Return the layout in a control block, or None if HiCache did not write it."""
        if len(data) < cls.BYTES:
            return None
        magic, version, processes, pages, frame_bytes, shape, keep = cls._PACKED.unpack_from(data)
        return cls(processes, pages, frame_bytes, shape, version, keep) if magic == cls._MAGIC else None

    @property
    def size_bytes(self) -> int:
        """Bytes of all frames."""
        return self.pages * self.frame_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return CONTROL_BYTES + self.size_bytes

    def difference(self, other: Layout, other_bytes: int) -> str | None:
        """Return how another file, `other_bytes` long, differs from this one, or None."""
        if other.version != self.version:
            return f"another version of HiCache made it (format {other.version}, this one has {self.version})"
        if other.pages != self.pages:
            return f"it has {other.pages} pages, not {self.pages}"
        if other.shape != self.shape or other.frame_bytes != self.frame_bytes:
            return "its pages have another shape"
        if other.processes != self.processes:
            return f"it is for {other.processes or 'any number of'} processes, not {self.processes or 'any number'}"
        if other_bytes != self.file_bytes:
            return f"it has {other_bytes} bytes, not {self.file_bytes}"
        return None


class SharedMemory:
    """The frames of one file, mapped into this process. Use `open` or `attach`.

    `identity`, device and inode, is equal in two processes if and only if they share the memory. Compare it before the
    first copy if a process may have been restarted, because a name can be reused.
    `mapping` contains all frames, 4096-aligned. All its pages are mapped for writing if the kernel can do that at once.
    """

    def __init__(self, name: str, layout: Layout, descriptor: int, mapping: mmap.mmap) -> None:
        self.name = name
        self.path = path_of(name)
        self.layout = layout
        self.mapping = mapping
        state = os.fstat(descriptor)
        self.identity = (state.st_dev, state.st_ino)
        self._descriptor = descriptor
        self._process = os.getpid()
        self._address = address_of(self.frames)
        self._leave = weakref.finalize(self, _leave, descriptor, self.path, bool(layout.processes), self._process)
        _MAPPED[self._address] = weakref.ref(self)

    @classmethod
    def open(
        cls, name: str, layout: Layout, *, deadline: float, role: Role = Role.OWNER, node: int | None = None,
        count_pages: Callable[[], int] | None = None, require_memory: Callable[[int], None] = lambda pages: None,
    ) -> SharedMemory:
        """Open the memory `name`, or create it. Blocks until it is ready, at most until `deadline` (monotonic clock).
        The process that creates the memory also blocks as long as the kernel needs to zero it.

        With `count_pages`, existing memory keeps its number of pages, and new memory has the number that it returns.
        `require_memory` is called with the number before memory is allocated, and raises if the machine has too little.
        The process that creates the file takes its memory from NUMA node `node` (None: any node), like `numa.bind`. To
        make room, dead memory of other names is removed first (`remove_dead`). REQUIRES: for DAEMON, a persistent
        layout.

        Raises CapacityError if the memory does not fit (then all of it is freed), SharedMemoryError if the file differs
        from `layout`, is not ready in time, is open in another process and the role forbids that, or if the path holds
        a file that HiCache did not create or that other users can open; InvalidInput for an invalid name.
        """
        opening = _Opening(path_of(name), layout, deadline, role, node, count_pages, require_memory)
        remove_dead(spare=name)
        while True:
            descriptor = opening.descriptor()
            try:
                mapping = opening.join(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if mapping is not None:
                memory = cls(name, opening.wanted, descriptor, mapping)  # closes the file if Ctrl-C ends `populate`
                populate(mapping)
                return memory
            os.close(descriptor)

    @classmethod
    def attach(cls, name: str, *, identity: tuple[int, int] | None = None, deadline: float) -> SharedMemory:
        """Map memory that members have open, or a persistent file that a member will open. Blocks at most until
        `deadline`.

        Does not allocate memory, because the creator of the file may have written any size into it: check `layout`,
        then call `populate`. Raises SharedMemoryError if the file does not exist, is not `identity`, is not persistent,
        belongs to another user, or if its size differs from its control block; InvalidInput for an invalid name.
        """
        path = path_of(name)
        try:
            descriptor = open_file(path)
        except FileNotFoundError as error:
            raise file_error(path, "does not exist; containers of engine and daemon must share /dev/shm") from error
        try:
            with flock(path, descriptor, deadline):
                state = os.fstat(descriptor)
                found = Layout.unpack(os.pread(descriptor, Layout.BYTES, 0))
                if identity is not None and (state.st_dev, state.st_ino) != identity:
                    raise file_error(path, "has another device or inode than requested; open it again and send both")
                if found is None or found.version != _VERSION or not found.pages or state.st_size != found.file_bytes:
                    raise file_error(path, "was not created by HiCache, or its creation was cut short")
                if found.processes:
                    what = f"is for {found.processes} processes and not persistent; create it without processes"
                    raise file_error(path, what)
                mapping = _mapped(path, descriptor, found)
                lock_byte(descriptor, fcntl.F_RDLCK, _ATTACHED)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(name, found, descriptor, mapping)

    @property
    def frames(self) -> memoryview:
        """All frames, contiguous."""
        return memoryview(self.mapping)

    def has_others(self) -> bool:
        """True if another process has opened the memory. Processes that have attached it do not count."""
        return is_locked(self._descriptor, 0, PROCESSES_MAX)

    def claim(self) -> None:
        """Claim the right to assign pages to owners, until this process ends. Raises SharedMemoryError if another
        process has it: both would write their pages into the same frames."""
        if not lock_byte(self._descriptor, fcntl.F_WRLCK, _CLAIMED):
            raise file_error(self.path, "belongs to another engine; end that engine, or give each engine its own name")

    def unlink(self) -> None:
        """Remove the name if it still belongs to this memory. The memory is freed when the last process has unmapped
        it. No effect in the child of a fork, whose parent still uses the memory.
        """
        if os.getpid() != self._process:
            return
        with contextlib.suppress(FileNotFoundError):
            state = os.lstat(self.path)
            if (state.st_dev, state.st_ino) == self.identity:
                os.unlink(self.path)

    def unlink_if_left(self) -> bool:
        """Remove the name if no other process has opened the memory and `keep` is not set. Return True if no process
        has it open, False also while another process is opening it. For a daemon, whose engine may be restarting."""
        with contextlib.suppress(SharedMemoryError), flock(self.path, self._descriptor, -math.inf):
            is_left = not self.has_others()
            if is_left and not self.layout.keep:
                self.unlink()
            return is_left
        return False

    def close(self) -> None:
        """Unmap the memory. REQUIRES: all views of it are deleted; otherwise raises BufferError and changes nothing."""
        self.mapping.close()
        _MAPPED.pop(self._address, None)
        self._leave()


@dataclass(slots=True)
class _Opening:
    """One `SharedMemory.open`. With `count_pages`, the pages of `wanted` are those of the file seen last."""

    path: Path
    wanted: Layout
    deadline: float
    role: Role
    node: int | None
    count_pages: Callable[[], int] | None
    require_memory: Callable[[int], None]

    def descriptor(self) -> int:
        """Return a descriptor of this user's file, or of a new and empty one."""
        while True:
            try:
                return open_file(self.path)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another process has created it first
                    return open_file(self.path, creates=True)

    def join(self, descriptor: int) -> mmap.mmap | None:
        """Create, verify or replace the file, and map it. Return None to start again: its name has been removed, or a
        daemon is still attached to a leftover."""
        with flock(self.path, descriptor, self.deadline):
            state = os.fstat(descriptor)
            if state.st_nlink == 0:
                return None
            if state.st_size == 0:  # new, or its creator died before the first write
                self._fill(descriptor)
            elif not self._verify(descriptor, state.st_size):
                return None
            os.pwrite(descriptor, self.wanted.pack(), 0)  # a leftover may have another value of `keep`
            if not self._take_place(descriptor):
                os.unlink(self.path)  # all members have joined, and the last one failed to remove the name
                return None
            try:
                return _mapped(self.path, descriptor, self.wanted)
            except CapacityError:
                if os.fstat(descriptor).st_nlink and not is_locked(descriptor, 0, _ATTACHED + 1):
                    os.unlink(self.path)
                raise

    def _verify(self, descriptor: int, size_bytes: int) -> bool:
        """Return True if the file can be joined as it is. Otherwise unlink a leftover, or wait for another process."""
        found = Layout.unpack(os.pread(descriptor, Layout.BYTES, 0))
        if found is None:
            raise file_error(self.path, "was not created by HiCache; it is unchanged. Choose another name")
        if self.count_pages is not None:
            self.wanted = replace(self.wanted, pages=max(1, found.pages))
        difference = self.wanted.difference(found, size_bytes)
        has_members = is_locked(descriptor, 0, PROCESSES_MAX)
        if difference is not None and has_members:
            raise file_error(self.path, f"{difference}. Give all processes the same arguments, or choose another name")
        # The previous engine may be about to end. Two engines would write their pages into the same frames.
        is_taken = has_members and self.role in (Role.ALONE, Role.GUEST)
        is_mapped = not has_members and self.role is not Role.GUEST and is_locked(descriptor, _ATTACHED, 1)
        if (is_taken or is_mapped) and time.monotonic() < self.deadline:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # so that a daemon can take it and remove the name
            time.sleep(RETRY_S)
            return False
        if is_taken:
            raise file_error(self.path, "belongs to another engine; end that engine, or give each engine its own name")
        if is_mapped or difference is not None:  # by a daemon
            os.unlink(self.path)
            return False
        return True

    def _fill(self, descriptor: int) -> None:
        """Write the control block of an empty file and allocate all memory. Remove the name if that fails."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.path.unlink, missing_ok=True)
            if self.count_pages is not None:
                self.wanted = replace(self.wanted, pages=self.count_pages())
            wanted = self.wanted
            system = os.fstatvfs(descriptor)
            free_bytes = system.f_bavail * system.f_frsize
            if system.f_blocks and wanted.file_bytes > free_bytes:  # no blocks: a tmpfs without a limit
                raise _full(wanted, free_bytes)
            self.require_memory(wanted.pages)
            if self.node is not None:
                bind_file(descriptor, wanted.file_bytes, self.node)
            os.pwrite(descriptor, wanted.pack(), 0)
            try:
                # On one thread: the kernel runs one allocation per file at a time. `populate` zeroes the memory.
                os.posix_fallocate(descriptor, 0, wanted.file_bytes)
            except OSError as error:
                raise _full(wanted, free_bytes) if error.errno in _FULL else error from error
            undo.pop_all()

    def _take_place(self, descriptor: int) -> bool:
        """Lock a byte for this process; the last process removes the name. Return False if all bytes are locked."""
        processes = self.wanted.processes
        if not processes:
            return lock_byte(descriptor, fcntl.F_RDLCK, _ATTACHED if self.role is Role.DAEMON else 0)
        place = next((at for at in range(processes) if lock_byte(descriptor, fcntl.F_WRLCK, at)), None)
        if place is None:
            return False
        if all(is_locked(descriptor, at, 1) for at in range(processes) if at != place):
            os.unlink(self.path)
        return True


# The memory that this process has mapped, by its first address; a few entries.
_MAPPED: dict[int, weakref.ref[SharedMemory]] = {}


def find(view: memoryview) -> tuple[SharedMemory, int] | None:
    """Return the shared memory that contains a writable view of this process, and the offset of the view; None for
    private memory. Takes two microseconds."""
    address, end = address_of(view), view.nbytes
    for first, reference in list(_MAPPED.items()):
        offset = address - first
        memory = reference()
        if memory is None:
            _MAPPED.pop(first, None)
        elif offset >= 0 and offset + end <= memory.layout.size_bytes:
            return memory, offset
    return None


def remove_dead(*, spare: str = "") -> list[str]:
    """Remove the memory that no process has open any more, except that of the name `spare` and memory with `keep`.
    Return the names. Does not wait.

    Removes only files of this user that have a name and a control block of this version of HiCache. The memory is in
    use as long as any process has it mapped, also the child of a fork.
    """
    removed = []
    for path in FOLDER.glob(f"{_PREFIX}*"):
        name = path.name.removeprefix(_PREFIX)
        if name != spare and _NAME.fullmatch(name):
            with contextlib.suppress(OSError, SharedMemoryError):  # another user's, or another process removes it
                size_bytes = _remove_if_dead(path)
                if size_bytes is not None:
                    logger.info("memory %s: its processes have ended; removed (%s)", name, format_size(size_bytes))
                    removed.append(name)
    return removed


def _remove_if_dead(path: Path) -> int | None:
    """Return the size of a file that was removed, None for one that stays. Raises OSError and SharedMemoryError."""
    descriptor = open_file(path)
    try:
        with flock(path, descriptor, -math.inf):
            state, found = os.fstat(descriptor), Layout.unpack(os.pread(descriptor, Layout.BYTES, 0))
            if found is None or found.version != _VERSION or found.keep or is_locked(descriptor, 0, 0):
                return None
            if not os.path.samestat(state, os.lstat(path)):
                return None  # the name belongs to newer memory
            os.unlink(path)
            return state.st_blocks * 512
    finally:
        os.close(descriptor)


def path_of(name: str) -> Path:
    """Return the file of the memory `name`. Raises InvalidInput for an invalid name."""
    if not _NAME.fullmatch(instance("shared host pool: name", name, str)):
        raise InvalidInput("shared host pool: name: use 1 to 128 letters, digits, dashes and dots")
    return FOLDER / f"{_PREFIX}{name}"


def _mapped(path: Path, descriptor: int, layout: Layout) -> mmap.mmap:
    """Map the frames. Raises CapacityError."""
    try:
        return mmap.mmap(descriptor, layout.size_bytes, flags=mmap.MAP_SHARED, offset=CONTROL_BYTES)
    except OSError as error:
        what = f"{layout.size_bytes} bytes cannot be mapped: {error.strerror}; raise the limits of this process"
        raise CapacityError(f"shared host pool: {path}: {what}, or lower host.size") from error


def _full(wanted: Layout, free_bytes: int) -> CapacityError:
    return CapacityError(
        f"shared host pool: {wanted.pages} pages of {wanted.frame_bytes} bytes need {wanted.file_bytes} bytes "
        f"in {FOLDER}, but only {free_bytes} are free, or a limit of this process is lower; enlarge it (mount -o "
        "remount,size=..., docker --shm-size), or lower host.size"
    )


def _leave(descriptor: int, path: Path, last_unlinks: bool, process: int) -> None:
    """Close the file of a memory. After a failed start, the last process removes the name."""
    if os.getpid() != process:
        return  # a forked child; the memory belongs to its parent
    # If the lock is held, another process is joining, and will be the last one. It ends before the file is closed: a
    # remaining view keeps the mapping, whose duplicate of the descriptor would keep the lock.
    with contextlib.suppress(OSError), flock(path, descriptor, -math.inf):
        if last_unlinks and os.fstat(descriptor).st_nlink and not is_locked(descriptor, 0, PROCESSES_MAX):
            os.unlink(path)
    os.close(descriptor)

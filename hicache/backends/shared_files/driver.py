"""The driver of shared files: one page per file in a directory that many machines mount. No lock, no index, no service.

A page is written to a temporary file beside its final name and renamed, so it appears whole. A lookup is a `stat`. The
modification time of a file is its last use. The names that a call publishes appear in the order of its keys, so a
reader that finds a page also finds the pages of the call before it. docs/formats/shared_files.md specifies the format.

**A mount that hangs holds no thread of an engine and no frame.** Every call of the system that an engine waits for can
be left at its deadline (see `threads`). The price is one copy per page.

A server that restarts may forget handles of files (ESTALE). Each step is then tried once more from the root, which is
opened again.

Locking design: `_lock` guards `_touched`; it is held for a few instructions. The lease and the listing belong to the
thread of the sweeps, or of a tool. Other listings may run at the same time: see `listing`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ...arguments import instance
from ...clock import SYSTEM_CLOCK, Clock
from ...config.storage import SharedFilesStorageOptions
from ...errors import BackendUnavailable, PageUnreadable
from ...frame import FrameCodec, TagStream, fill
from ...logs import LimitedLog
from ..base import PageId, StoredPage, Usage
from ..driver import Answer, Swept
from ..errors import ErrorKind, StoreError
from ..file.mounts import UNKNOWN, misplaced
from ..file.pages import Identity, NotThePage, PageFiles, error_name, page_name, read_object, remove_damaged
from ..file.system import System
from ..pages import SETTLE_S, PageReads, PageWrites
from ..prefix import search_prefix
from .lease import SweepLease
from .listing import Listing
from .root import Root, check_mount, open_root
from .threads import AbandonableCalls, Lent
from .writes import SharedFileWrites

_log = logging.getLogger(__name__)
# A daemon opens a store for each namespace.
_limited_log = LimitedLog(_log, 3600.0)
T = TypeVar("T")

_OPEN_S = 10.0
_CLOSE_S = 5.0
# A page that is used all the time is touched once in this time, by each engine and by all of them together.
TOUCH_S = 60.0
_TOUCHED_MAX = 1 << 16
# Removals of one round: the calls of engines wait for the threads no longer than one round takes.
_REMOVED_AT_ONCE = 64


class SharedFilesDriver:
    """Pages in the files of a shared directory. See the module's docstring; `Driver` describes each function. The
    identity of a file distinguishes it from its successor.

    `codec` is None for a tool: then the store must exist. The constructor raises NotOurs, and BackendUnavailable for a
    directory that cannot be used, also if its mount hangs for 10 s. Open it after a fork. `system` is for tests.
    """

    def __init__(
        self, codec: FrameCodec | None, options: SharedFilesStorageOptions, *, system: System | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.options = instance("options", options, SharedFilesStorageOptions)
        self._clock = clock
        self._system = System() if system is None else system
        self._is_tool = codec is None
        self._calls = AbandonableCalls(options.io_threads, clock)
        self._root = self._open()
        self._files = PageFiles(self._root.fd, codec, system=self._system, direct_io=False, sync=False)
        self._lease = SweepLease(self._system, self._root, clock)
        self._listing = Listing(self._system, self._root, clock)
        self._writes = SharedFileWrites(self._system, self._root, self._files, self._calls, clock)
        self._touched: dict[PageId, float] = {}
        self._lock = threading.Lock()
        kind = UNKNOWN
        with contextlib.suppress(OSError):
            kind = self._system.file_system(self._root.fd)
        if not self._is_tool and (advice := misplaced("shared_files", kind)):
            _limited_log.warn(self._root.path, "shared files %s: the file system is %s; %s", self._root.path, kind,
                              advice)

    def _open(self) -> Root:
        def close(late: Root | None) -> None:
            if late is not None:
                late.close()

        try:
            root = self._calls.one(lambda: open_root(
                self.options.path, create=not self._is_tool, system=self._system, clock=self._clock
            ), self._clock() + _OPEN_S, close)
            if root is None:
                raise BackendUnavailable(
                    f"shared files {self.options.path}: the file system did not answer for {_OPEN_S:.0f} s; check the "
                    "mount and its server"
                )
        except BaseException:
            self._calls.close(0.0)
            raise
        return root

    # Lookups and uses

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[Answer]:
        """See Driver. One stat per key, in parallel."""
        return self._look_up(namespace, keys, deadline, is_use=False)

    find_prefix = search_prefix  # see FindsPrefixes

    def touch(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[Answer]:
        """See Touches. One stat per key, and a change of its time if that is older than a minute."""
        return self._look_up(namespace, keys, deadline, is_use=True)

    def _look_up(self, namespace: bytes, keys: Sequence[bytes], deadline: float, *, is_use: bool) -> list[Answer]:
        def look_up(name: str, position: int) -> bool:
            found = self._root.call(self._files.find, name)
            if found is not None and is_use:
                self._use(name, (namespace, keys[position]), found.st_mtime)
            return found is not None

        return self._on_files(namespace, keys, deadline, look_up, len(keys))

    def _on_files(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, work: Callable[[str, int], bool], at_once: int
    ) -> list[Answer]:
        """Return the answer of `work(name, position)` for each key, False for a missing file, or the kind of the
        failure. In parallel, in rounds of `at_once` files."""
        answers: list[Answer] = [ErrorKind.DEADLINE] * len(keys)
        folder = namespace.hex()

        def one(start: int, number: int) -> None:
            position = start + number
            try:
                answers[position] = work(page_name(folder, keys[position]), position)
            except FileNotFoundError:
                answers[position] = False
            except OSError as error:
                answers[position] = error_name(error)

        for start in range(0, len(keys), at_once):
            if not self._calls.each(min(at_once, len(keys) - start), functools.partial(one, start), deadline):
                break
        return list(answers)  # a thread that hangs may still write into the other list

    def _use(self, name: str, page: PageId, used_s: float) -> None:
        """Record the use of a page whose file has the time `used_s`, once per TOUCH_S. A failure costs only recency."""
        now_s = self._clock()
        with self._lock:
            is_fresh = now_s - self._touched.get(page, -math.inf) < TOUCH_S
            if is_fresh or abs(self._clock.wall_s() - used_s) < TOUCH_S:
                return
            self._touched.pop(page, None)
            self._touched[page] = now_s
            while len(self._touched) > _TOUCHED_MAX:
                del self._touched[next(iter(self._touched))]
        with contextlib.suppress(OSError):
            self._root.call(functools.partial(self._system.utime, name, None, dir_fd=self._root.fd))

    # Reads

    def read(self, pages: PageReads[Identity]) -> None:
        """See Driver. The pages in parallel, each through a buffer of its thread."""
        lent, namespace, keys = Lent(pages), pages.codec.namespace, pages.keys

        def read_one(position: int) -> None:
            if lent.use(lambda mine: not mine.is_late):
                name = page_name(namespace.hex(), keys[position])
                used_s = self._read(lent, name, position)
                if used_s is not None:
                    self._use(name, (namespace, keys[position]), used_s)

        try:
            self._calls.each(len(pages), read_one, pages.deadline)
        finally:
            lent.take_back()

    def _read(self, lent: Lent[PageReads[Identity]], name: str, position: int) -> float | None:
        """Read one page into this thread's buffer, and from there into the caller's if it still waits. Return the time
        of the file for a hit."""
        data = memoryview(b"")

        def buffer(size: int) -> list[memoryview]:
            nonlocal data
            data = self._calls.buffer(size)
            return [data]

        def read() -> tuple[Identity, TagStream | None]:
            arrived = lent.use(PageReads.stream)
            return self._files.read(name, buffer, arrived), arrived

        def take(mine: PageReads[Identity], found: Identity, arrived: TagStream | None) -> float | None:
            fill(mine.buffers(position, len(data)), data)
            return found[1] / 1e9 if mine.accept(position, len(data), found, arrived) else None

        def damage(mine: PageReads[Identity], other: NotThePage) -> None:
            mine.damage(position, other.reason, other.found)
            if other.stays:
                mine.miss(position)

        try:
            found, arrived = self._root.call(read)
        except FileNotFoundError:
            lent.use(lambda mine: mine.miss(position))
        except NotThePage as error:
            lent.use(functools.partial(damage, other=error))
        except OSError as error:
            lent.use(functools.partial(PageReads.fail, position=position, kind=error_name(error)))
        else:
            return lent.use(lambda mine: take(mine, found, arrived))
        return None

    # Writes

    def write(self, pages: PageWrites) -> None:
        """See Driver. The missing pages are written in parallel, and appear head first when all are written."""
        missing: list[int] = []
        for position, answer in enumerate(
            self._look_up(pages.codec.namespace, pages.keys, pages.deadline, is_use=True)
        ):
            if answer is False:
                missing.append(position)
            elif answer is True:
                pages.present(position)
            else:
                pages.fail(position, answer)
        if missing:
            self._writes.run(pages, missing)

    @property
    def rejection(self) -> str | None:
        return self._writes.rejection

    # Removals

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[Identity] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver. In parallel, a round of files at a time. With `found`, only while the mount shows the store's
        marker as it was written."""
        def remove_one(name: str, position: int) -> bool:
            return self._root.call(self._remove, name, None if found is None else found[position])

        answers = self._on_files(namespace, keys, deadline, remove_one, _REMOVED_AT_ONCE)
        return answers.count(True), [answer for answer in answers if isinstance(answer, str)]

    def _remove(self, name: str, found: Identity | None) -> bool:
        system, root_fd = self._system, self._root.fd
        if found is not None:
            check_mount(root_fd, system)
            return remove_damaged(system, root_fd, name, found)
        try:
            system.unlink(name, dir_fd=root_fd)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
        return True

    # The whole store, on the caller's thread: sweeps, measurements and tools

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver. Holds the names of one directory of pages. Directories that vanish are skipped."""
        try:
            yield from self._listing.pages(namespace)
        except OSError as error:
            raise StoreError(error_name(error)) from error

    def read_start(self, page: StoredPage, bytes_max: int, deadline: float) -> tuple[bytes, Identity | None] | None:
        name = page_name(page.namespace.hex(), page.key)
        try:
            return self._root.call(read_object, self._system, self._root.fd, name, bytes_max)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PageUnreadable(f"shared files {self._root.path}: page {name}: {error}; check the server") from error

    def measure(self) -> Usage:
        """See Driver. The result of the last sweep; without one, of a listing."""
        swept = self._lease.swept
        if swept.ended:
            return Usage(swept.pages, swept.bytes, None)
        sizes = [page.bytes for page in self.pages("", 0.0)]
        return Usage(len(sizes), sum(sizes), None)

    def free_bytes(self) -> int:
        """See SharesSweeps: what the file system has free above `free_space_floor`."""
        space = self._for_sweep(self._system.statvfs, self._root.fd)
        return space.f_bavail * space.f_frsize - self.options.free_space_floor

    @property
    def swept(self) -> Swept:
        return self._lease.swept

    @property
    def unpublished_bytes(self) -> int:
        return self._listing.temporary_bytes

    @property
    def sweeps(self) -> bool:
        return self._lease.is_ours

    def begin_sweep(self, needs_room: bool) -> bool:
        return self._for_sweep(self._lease.visit, needs_room)

    def continue_sweep(self) -> None:
        self._for_sweep(self._lease.beat)

    def end_sweep(self, pages: int, size_bytes: int) -> None:
        self._for_sweep(self._lease.end, pages, size_bytes)
        self._for_sweep(self._listing.tidy)

    def _for_sweep(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return self._root.call(call, *args)
        except OSError as error:
            raise BackendUnavailable(f"shared files {self._root.path}: {error}; check the server") from error

    def close(self) -> None:
        """See Driver. Waits at most some seconds for threads that hang; they close the root when they return."""
        if not self._is_tool:
            with contextlib.suppress(StoreError):
                self._calls.each(1, self._release, self._clock() + SETTLE_S)
        has_ended = self._calls.close(_CLOSE_S)
        self._root.close()
        if not has_ended:
            _log.warning("shared files %s: calls of the system still hang; their threads end when these return",
                         self._root.path)

    def _release(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the others take the lease over by its age
            self._root.call(self._lease.release)

"""Writing the pages of one call: first all temporary files, in parallel, and then their names, head first.

Locking design: the threads of the calls write the files; one of them publishes all. `rejection` is a hint, written by
any thread.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...clock import Clock
from ...frame import join
from ..file.pages import FULL_ERRNOS, PageFiles, error_name, make_folder, page_name
from ..file.system import System, why_no_room
from ..pages import SETTLE_S, PageWrites
from .root import Root, when_settled
from .threads import AbandonableCalls, Lent


@dataclass(eq=False)
class SharedFileWrites:
    """See the module's docstring. `rejection` is the reason why the last call rejected pages, or None. Thread-safe."""

    _system: System
    _root: Root
    _files: PageFiles
    _calls: AbandonableCalls
    _clock: Clock
    _writer: str = field(default_factory=lambda: secrets.token_hex(6))
    _serial: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    rejection: str | None = None

    def run(self, pages: PageWrites, missing: Sequence[int]) -> None:
        """Store the pages at these positions, and report them. Blocks until the deadline, or a moment longer to
        publish. Raises StoreError if all threads hang."""
        self.rejection = None
        self._publish(pages, self._write_files(pages, missing))

    def _write_files(self, pages: PageWrites, missing: Sequence[int]) -> dict[int, str]:
        """Write the missing pages to temporary files; return their names by position. Reports the pages that failed."""
        lent, written = Lent(pages), dict[int, str]()
        folder, keys, used_s, deadline = pages.codec.namespace.hex(), pages.keys, pages.used_s, pages.deadline

        def sealed(mine: PageWrites, position: int) -> memoryview | None:
            if mine.is_late or mine.is_full:
                return None
            parts = mine.sealed(position)
            data = self._calls.buffer(sum(part.nbytes for part in parts))
            join(parts, data)
            return data

        def write_one(number: int) -> None:
            position = missing[number]
            data = lent.use(lambda mine: sealed(mine, position))
            if data is None:
                return
            try:
                write = functools.partial(self._root.call, self._write, page_name(folder, keys[position]), data, used_s)
                temporary = when_settled(write, self._clock, deadline)
            except OSError as error:
                lent.use(functools.partial(self._refuse, position=position, error=error))
            else:
                if lent.use(lambda mine: written.setdefault(position, temporary)) is None:
                    self._discard(temporary)

        try:
            self._calls.each(len(missing), write_one, pages.deadline)
        finally:
            lent.take_back()
        return written

    def _write(self, name: str, data: memoryview, used_s: float | None) -> str:
        """Write a new temporary file beside the page `name`; return its name. Raises OSError without a new file."""
        folder, _, key = name.rpartition("/")
        # A name that GlusterFS places like the final one: a rename then moves no data.
        temporary = f"{folder}/.{key}.{self._writer}{next(self._serial)}"
        try:
            try:
                self._files.write(temporary, [data])
            except (FileNotFoundError, NotADirectoryError):
                for above in (folder.partition("/")[0], folder):
                    make_folder(self._system, self._root.fd, above)
                self._files.write(temporary, [data])
            if used_s is not None:
                self._system.utime(temporary, int(used_s * 1e9), dir_fd=self._root.fd)
        except OSError:
            self._discard(temporary)
            raise
        return temporary

    def _publish(self, pages: PageWrites, written: dict[int, str]) -> None:
        """Rename the written files in the order of their pages, and report them. After a page without room, none is
        published: its successors would follow a hole."""
        folder, keys = pages.codec.namespace.hex(), pages.keys
        until = max(pages.deadline, self._clock() + SETTLE_S)
        rejected_from = pages.rejected_from
        # None once the page has its name.
        results: dict[int, OSError | None] = {}
        lent = Lent(results)
        # Taken by the thread that publishes the files, or by this one if none could begin in time.
        untaken = [sorted(written.items())] if written else []

        def publish(number: int) -> None:
            nonlocal rejected_from
            for position, temporary in untaken.pop():
                result: OSError | None = None
                if position >= rejected_from or lent.use(lambda mine: True) is None:
                    self._discard(temporary)
                    continue
                try:
                    self._root.call(self._files.publish, temporary, page_name(folder, keys[position]))
                except OSError as error:
                    result = error
                    self._discard(temporary)
                    if error.errno in FULL_ERRNOS:
                        rejected_from = position
                lent.use(functools.partial(_note, position, result))

        try:
            self._calls.each(len(untaken), publish, until)
        finally:
            lent.take_back()
            with contextlib.suppress(IndexError):
                unwanted = [temporary for _, temporary in untaken.pop()]
                self._calls.later(functools.partial(self._discard, *unwanted))
        for position, result in sorted(results.items()):
            if result is None:
                pages.stored(position)
            else:
                self._refuse(pages, position, result)

    def _refuse(self, pages: PageWrites, position: int, error: OSError) -> None:
        """Report a page that could not be written: rejected if the file system or a quota has no room for it."""
        reason = error_name(error)
        if error.errno in FULL_ERRNOS:
            why = "no room, a quota, or mounted read-only; make room, or lower capacity below the quota"
            if error.errno == errno.ENOSPC:
                with contextlib.suppress(OSError):
                    why = why_no_room(self._root.call(functools.partial(self._system.statvfs, self._root.fd)))
            self.rejection = f"the file system says {reason}: {why}"
            pages.reject(position, reason)
        else:
            pages.fail(position, reason)

    def _discard(self, *temporaries: str) -> None:
        for temporary in temporaries:
            with contextlib.suppress(OSError):  # removed by its age later
                self._root.call(functools.partial(self._system.unlink, temporary, dir_fd=self._root.fd))


def _note(position: int, result: OSError | None, results: dict[int, OSError | None]) -> None:
    results[position] = result

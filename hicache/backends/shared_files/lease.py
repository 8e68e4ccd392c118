"""Who lists and sweeps: one engine for all that share a store, by a lease in the file `sweeper` of its root.

The file names its owner, and has the size of the store after the last listing. The owner writes it when a listing
begins, every BEAT_S during it, and at its end; the others read it, so that N engines do not list N times a minute. An
engine takes the lease over if

    the file is missing or damaged, or its owner has closed its store or could not list it
    its content has not changed for LEASE_S
    it needs room, no listing is in progress, and the content has not changed for URGENT_S

Each engine measures these times with its own clock, from when it first saw the content, so clocks may differ. Only at
its first visit it compares the time in the file with its own. A file is replaced by a rename. If two engines take the
lease at once, both list once, and the second one keeps it; nothing else depends on the lease.

Locking design: belongs to the thread of the sweeps, except for `swept` and `is_ours`, which read one reference.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import secrets
from dataclasses import asdict, dataclass, replace

from ...clock import Clock
from ..driver import Swept
from ..file.pages import FULL_ERRNOS, NOT_A_FILE_ERRNOS, read_start
from ..file.system import CREATE_FLAGS, System
from .root import MARKER, Root

LEASE_FILE = "sweeper"
TEMPORARY_LEASE = f".{LEASE_FILE}."
LEASE_S = 180.0  # three intervals between listings: see `limit`
BEAT_S = 10.0
URGENT_S = 15.0
_BYTES_MAX = 4096
# Stands for an owner whose name cannot be read yet.
_REPLACED = "replaced"
_NUMBER_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class _Lease:
    """The content of the file. `begun` and `ended` are the numbers of the newest listing and of the newest complete
    one, whose result `pages` and `bytes` are. `owner` is empty after its store was closed. `series` is as in Swept."""

    owner: str = ""
    series: str = ""
    begun: int = 0
    ended: int = 0
    beats: int = 0
    pages: int = 0
    bytes: int = 0
    written_s: float = 0.0


def _swept(lease: _Lease) -> Swept:
    return Swept(lease.pages, lease.bytes, lease.begun, lease.ended, lease.series)


class SweepLease:
    """See the module's docstring. All methods block on the file system and raise OSError."""

    def __init__(self, system: System, root: Root, clock: Clock) -> None:
        self._system = system
        self._root = root
        self._clock = clock
        self._owner = secrets.token_hex(8)
        self._found: _Lease | None = None
        self._is_first = True
        self._seen_at_s = -math.inf  # when this content was first seen
        self._written_at_s = -math.inf
        self._is_listing = False
        self._is_recorded = False  # the file shows the listing in progress
        self.swept = Swept(0, 0, 0, 0)

    @property
    def is_ours(self) -> bool:
        """True if this engine had the lease when it last read or wrote the file."""
        found = self._found
        return found is not None and found.owner == self._owner

    def visit(self, needs_room: bool) -> bool:
        """Read the file. Return True if it is this engine's turn, and record that its listing begins. After a listing
        that did not end, another engine gets a turn first: this one may be the only one that cannot list."""
        has_failed = self._is_listing
        if has_failed:
            self.release()
        seen, is_first = self._read(), self._is_first
        if is_first or seen != self._found:
            self._found, self._seen_at_s = seen, self._clock()
        self._is_first = False
        if seen is not None:
            self.swept = _swept(seen)
            if is_first and abs(self._clock.wall_s() - seen.written_s) > LEASE_S:
                self._seen_at_s = -math.inf
        found = seen or _Lease()
        is_urgent = needs_room and found.begun == found.ended
        is_old = self._clock() - self._seen_at_s >= (URGENT_S if is_urgent else LEASE_S)
        if has_failed or not (is_old or found.owner in ("", self._owner)):
            return False
        self._is_listing, self._is_recorded = True, False
        try:
            series = found.series or secrets.token_hex(8)
            self._write(replace(found, owner=self._owner, series=series, begun=found.begun + 1, beats=0))
            self._is_recorded = True
        except OSError as error:
            # Without room the sweep goes on, because it makes room. On a read-only mount others must sweep.
            self._is_listing = error.errno != errno.EROFS
            if error.errno not in FULL_ERRNOS:
                raise
        return self._is_listing

    def beat(self) -> None:
        """Show that the listing makes progress, every BEAT_S. Cheap in between."""
        if self._is_listing and self._clock() - self._written_at_s >= BEAT_S and (found := self._ours()):
            self._write(replace(found, beats=found.beats + 1))

    def end(self, pages: int, size_bytes: int) -> None:
        """Record the size of the store after the listing of this engine and its removals. Without a record of its
        beginning, the others could not tell which of their writes it has; then they list themselves."""
        self._is_listing = False
        if self._is_recorded and (found := self._ours()):
            self._write(replace(found, ended=found.begun, beats=0, pages=pages, bytes=size_bytes))

    def release(self) -> None:
        """Let another engine take the lease at once."""
        self._is_listing = False
        if found := self._ours():
            self._write(replace(found, owner="", begun=found.ended))

    def _ours(self) -> _Lease | None:
        """Return the content if this engine has the lease."""
        found = self._read()
        return found if found is not None and found.owner == self._owner else None

    def _read(self) -> _Lease | None:
        try:
            data = read_start(self._system, self._root.fd, LEASE_FILE, _BYTES_MAX)
            found = _Lease(**json.loads(data))
        except (FileNotFoundError, ValueError, TypeError, RecursionError):
            return None
        except OSError as error:
            if error.errno in NOT_A_FILE_ERRNOS:
                return None
            if error.errno != errno.ESTALE:
                raise
            # Is stale too if the handle of the root is; otherwise another engine has just replaced the file.
            read_start(self._system, self._root.fd, MARKER, 1)
            return replace(self._found or _Lease(written_s=self._clock.wall_s()), owner=_REPLACED)
        is_valid = all(type(value) is type(default) for value, default in zip(
            asdict(found).values(), asdict(_Lease()).values(), strict=True))
        numbers = (found.begun, found.ended, found.beats, found.pages, found.bytes)
        is_valid = is_valid and all(0 <= number < _NUMBER_MAX for number in numbers) and found.ended <= found.begun
        return found if is_valid else None

    def _write(self, lease: _Lease) -> None:
        system, fd = self._system, self._root.fd
        lease = replace(lease, written_s=self._clock.wall_s())
        temporary = f"{TEMPORARY_LEASE}{self._owner}"
        with contextlib.suppress(FileNotFoundError):
            system.unlink(temporary, dir_fd=fd)
        try:
            with system.opened(temporary, CREATE_FLAGS, dir_fd=fd) as file:
                system.pwritev(file, [memoryview(json.dumps(asdict(lease)).encode() + b"\n")], 0)
            system.rename(temporary, LEASE_FILE, dir_fd=fd)
        except OSError:
            with contextlib.suppress(OSError):
                system.unlink(temporary, dir_fd=fd)
            raise
        self._found, self._seen_at_s = lease, self._clock()
        self._written_at_s = self._clock()
        self.swept = _swept(lease)

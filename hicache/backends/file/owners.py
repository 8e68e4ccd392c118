"""Owner files: which openings use a store, and whether they live.

Each opening has an owner file in `tmp`, which it keeps locked with flock. Its line names the machine, the boot, the
device of the root, the host and the process; its time of change is a heartbeat, which transactions renew.

| the owner file of                                       | lives while                                            |
|---------------------------------------------------------|--------------------------------------------------------|
| the same boot and device ("near"), or without a line    | it is locked                                           |
| another one ("foreign"): its locks may not be seen here | its heartbeat is younger than HEARTBEAT_S              |
| this machine before its last restart                    | never                                                  |

Containers of one machine have the same boot id, also with different machine ids. Two mounts of a network or FUSE file
system have different devices, and the locks of one may not be seen through the other. The age of a heartbeat is
relative to this opening's own owner file, so that times of one file system are compared, not two machines' clocks.

A foreign owner that lives excludes this opening. Two machines exclude each other without locks: each writes or renews
its owner file first and then looks for the other's. An opening repeats this after a silence in which others may have
considered it dead. If both look at the same moment, both fail.

REQUIRES everywhere: the store's lock, except for `release`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import NamedTuple

from ...clock import Clock
from .mounts import is_shared
from .pages import FULL_ERRNOS, NOT_A_FILE_ERRNOS, TMP_DIR, file_id, find_id, is_hex, make_folder, read_head
from .system import LIST_FLAGS, OPEN_OR_CREATE_FLAGS, READ_FLAGS, System

OWNER_SUFFIX = ".alive"
OWNER_HEX_DIGITS = 16
# Longer than a healthy process stops (a suspended thread, a network file system that hangs for a moment), and short
# enough for an operator to wait for after the death of a machine.
HEARTBEAT_S = 60.0
# Three renewals may be late.
BEAT_S = HEARTBEAT_S / 4
# After this time without a renewal, others may consider this opening dead soon. The rest of HEARTBEAT_S is for the
# delay of times and names in the caches of network file systems.
_SILENCE_S = HEARTBEAT_S / 2
# Longer than every line: five words of at most 64 characters.
_LINE_BYTES_MAX = 512
# The file's parts before it has its name. Batches begin at 1.
_UNNAMED = ".0"
_UNKNOWN = "-"
_LINE = re.compile(rb"([!-~]+) ([!-~]+) ([0-9]+:[0-9]+) ([!-~]+) ([0-9]+)\n")
# A removed file, on a local and on a network file system.
_GONE_ERRNOS = frozenset({errno.ENOENT, errno.ESTALE})


class UsedElsewhere(OSError):
    """Another machine, or another mount, uses the store, or may have used it during a silence of this opening."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EBUSY, reason)


@dataclass(frozen=True, slots=True)
class Owner:
    """The line of an owner file: where its process runs. A word that is not known is `-`."""

    machine: str
    boot: str
    device: str
    host: str
    process: str

    @classmethod
    def here(cls, system: System, root_fd: int) -> Owner:
        """Return the line of this process, for the root `root_fd`. Raises OSError."""
        device = system.fstat(root_fd).st_dev
        return cls(
            system.fact("/etc/machine-id"), system.fact("/proc/sys/kernel/random/boot_id"),
            f"{os.major(device)}:{os.minor(device)}", system.fact("/proc/sys/kernel/hostname"), str(os.getpid()),
        )

    @classmethod
    def parse(cls, line: bytes) -> Owner | None:
        """Return the owner in an owner file, None if it has none, as the files of older versions."""
        found = _LINE.fullmatch(line)
        return None if found is None else cls(*(word.decode("ascii") for word in found.groups()))

    def line(self) -> bytes:
        return (" ".join(astuple(self)) + "\n").encode("ascii", "replace")

    def is_near(self, here: Owner) -> bool:
        """Return True if flock works between this owner and `here`. Where the boot is not known, machine and host must
        be the same."""
        same_kernel = self.boot == here.boot and (self.boot != _UNKNOWN or self._computer() == here._computer())
        return same_kernel and self.device == here.device

    def _computer(self) -> tuple[str, str]:
        return self.machine, self.host

    def is_of_an_earlier_boot(self, here: Owner, file_system: str) -> bool:
        """Return True if the machine `here` was restarted since, so that this owner is dead.

        Copies of a virtual machine have the same machine id, so this is only said of a disk, which other machines
        cannot mount at the same time: a network file system has no device with a major number.
        """
        is_disk = not here.device.startswith("0:") and not is_shared(file_system)
        is_known = _UNKNOWN not in (self.machine, self.boot, here.boot)
        is_same = self._computer() == here._computer() and self.device == here.device
        return is_disk and is_known and is_same and self.boot != here.boot

    def words(self, here: Owner) -> str:
        """Describe the owner for an operator."""
        if self.boot == here.boot and self.boot != _UNKNOWN:
            return f"process {self.process} of host {self.host}, through another mount of the directory,"
        return f"host {self.host} (machine {self.machine}, process {self.process})"


class _Found(NamedTuple):
    """An owner file: its owner, None without a line, and its heartbeat."""

    owner: Owner | None
    beat_ns: int


def owner_of(name: str) -> str | None:
    """Return the owner of a file in `tmp`, None if HiCache did not create the file."""
    owner, _, rest = name.partition(".")
    ours = is_hex(owner, OWNER_HEX_DIGITS) and (rest.isdigit() or f".{rest}" == OWNER_SUFFIX)
    return owner if ours else None


def living(system: System, root_fd: int, tmp_fd: int, names: Iterable[str], own: str) -> set[str]:
    """Return the owners among the `names` in `tmp` that live, and `own`. Raises OSError."""
    here, now_ns = Owner.here(system, root_fd), _own_beat_ns(system, tmp_fd, own)
    alive = {own}
    for name in names:
        if not name.endswith(OWNER_SUFFIX) or name == own + OWNER_SUFFIX:
            continue
        found = _read(system, tmp_fd, name)
        if found is None:
            continue
        if found.owner is None or found.owner.is_near(here):
            lives = _is_locked(system, tmp_fd, name)
        else:
            lives = _beats(found, here, now_ns, system, root_fd)
        if lives:
            alive.add(str(owner_of(name)))
    return alive


def _rival(system: System, root_fd: int, own: str) -> str | None:
    """Return words for the foreign owner that lives and was active last, None if there is none. Raises OSError."""
    here = Owner.here(system, root_fd)
    with system.opened(TMP_DIR, LIST_FLAGS, dir_fd=root_fd) as tmp_fd:
        now_ns, rivals = _own_beat_ns(system, tmp_fd, own), list[tuple[int, str]]()
        for name in system.listdir(tmp_fd):
            if owner_of(name) in (None, own) or not name.endswith(OWNER_SUFFIX):
                continue
            found = _read(system, tmp_fd, name)
            if found is None or found.owner is None or found.owner.is_near(here):
                continue
            if _beats(found, here, now_ns, system, root_fd):
                rivals.append((found.beat_ns, f"{found.owner.words(here)} uses it ({TMP_DIR}/{name})"))
    if not rivals:
        return None
    beat_ns, words = max(rivals)
    return f"{words}, last {max(0.0, (now_ns - beat_ns) / 1e9):.0f} s ago"


def _beats(found: _Found, here: Owner, now_ns: int, system: System, root_fd: int) -> bool:
    """Return True if a foreign owner lives. `now_ns` may be too early: then a dead owner counts as living, for a
    while."""
    if found.owner is not None and found.owner.is_of_an_earlier_boot(here, system.file_system(root_fd)):
        return False
    return now_ns - found.beat_ns < HEARTBEAT_S * 1e9


def _own_beat_ns(system: System, tmp_fd: int, own: str) -> int:
    try:
        return system.lstat(own + OWNER_SUFFIX, dir_fd=tmp_fd).st_mtime_ns
    except FileNotFoundError:
        return 0  # removed by a user: every foreign owner counts as living


def _read(system: System, tmp_fd: int, name: str) -> _Found | None:
    """Return an owner file, None if it is gone, or is something else than a file, which owners do not create. Opening
    it refreshes its attributes on a network file system. Raises OSError."""
    try:
        with system.opened(name, READ_FLAGS, dir_fd=tmp_fd) as fd:
            found, line = system.fstat(fd), memoryview(bytearray(_LINE_BYTES_MAX))
            if not stat.S_ISREG(found.st_mode):
                return None
            return _Found(Owner.parse(bytes(line[: read_head(system, fd, line)])), found.st_mtime_ns)
    except OSError as error:
        if error.errno not in (errno.ENOENT, *NOT_A_FILE_ERRNOS):
            raise
        return None


def _is_locked(system: System, tmp_fd: int, name: str) -> bool:
    try:
        with system.opened(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=tmp_fd) as fd:
            system.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        # Its owner has just closed the store, or it is a link, a socket or a directory, which owners do not create.
        if error.errno not in (errno.ENOENT, errno.EISDIR, *NOT_A_FILE_ERRNOS):
            raise
    return False


class OwnerFile:
    """The owner file of this opening, with the name `owner`.

    On a full disk it may have no line until there is room: then only processes of this machine see its owner.
    """

    def __init__(self, system: System, root_fd: int, owner: str, clock: Clock) -> None:
        self._system = system
        self._root_fd = root_fd
        self._owner = owner
        self._clock = clock
        self._name = f"{TMP_DIR}/{owner}{OWNER_SUFFIX}"
        self._fd: int | None = None
        self._id: tuple[int, int] | None = None
        self._has_line = False
        self._beaten_s = 0.0

    def is_there(self) -> bool:
        """Return True if the file of this opening exists. Raises OSError."""
        return self._fd is not None and find_id(self._system, self._root_fd, self._name) == self._id

    def hold(self) -> bool:
        """Create the owner file, or renew it if it is due. Return True if it was not there: then others may have
        changed the store since the last transaction.

        Raises UsedElsewhere, and then the owner file is removed, and OSError.
        """
        is_new, age_s = not self.is_there(), self._clock() - self._beaten_s
        if not is_new:
            if age_s < BEAT_S:
                return False
            is_new = not self._renew()
        if is_new:
            self.release()
            make_folder(self._system, self._root_fd, TMP_DIR)
        if is_new or age_s >= _SILENCE_S:
            self._create_again(is_new)
            self._exclude()
        return is_new

    def beat(self) -> None:
        """Renew the heartbeat in a long transaction, if it is due. Raises UsedElsewhere if the heartbeat stopped for so
        long that others may use the store now, and OSError."""
        age_s = self._clock() - self._beaten_s
        if self._fd is None or age_s < BEAT_S:
            return
        if not (self.is_there() and self._renew()):
            self.release()
            raise UsedElsewhere("its owner file was removed in a long transaction, so another machine may use it")
        if age_s >= _SILENCE_S:
            self._exclude()

    def _renew(self) -> bool:
        """Write a heartbeat. Return False if the file was removed."""
        assert self._fd is not None
        try:
            if not self._has_line:
                self._write_line(self._fd)
            self._system.touch(self._fd)
        except OSError as error:
            if error.errno in _GONE_ERRNOS:
                return False
            if error.errno not in FULL_ERRNOS:
                raise
        self._beaten_s = self._clock()
        return True

    def _create_again(self, is_new: bool) -> None:
        """Replace the owner file by a new one, which other machines see as a change of the directory, and after which
        a network file system lists the directory again. A full disk keeps the old one."""
        try:
            self._create()
        except OSError as error:
            if is_new or error.errno not in FULL_ERRNOS:
                raise

    def _create(self) -> None:
        """Create and lock the file, and then give it its name, so that others see it only with its line."""
        system, unnamed = self._system, f"{TMP_DIR}/{self._owner}{_UNNAMED}"
        fd = system.open(unnamed, OPEN_OR_CREATE_FLAGS, dir_fd=self._root_fd)
        try:
            system.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self._write_line(fd)
                system.touch(fd)
            except OSError as error:
                if error.errno not in FULL_ERRNOS:
                    raise
            found = file_id(system.fstat(fd))
            system.rename(unnamed, self._name, dir_fd=self._root_fd)
        except OSError:
            with contextlib.suppress(OSError):
                system.unlink(unnamed, dir_fd=self._root_fd)
            with contextlib.suppress(OSError):
                system.close(fd)
            raise
        before, self._fd, self._id, self._beaten_s = self._fd, fd, found, self._clock()
        if before is not None:
            with contextlib.suppress(OSError):
                system.close(before)

    def _write_line(self, fd: int) -> None:
        """Write the line, to the server of a network file system."""
        self._has_line = False
        line = memoryview(Owner.here(self._system, self._root_fd).line())
        is_whole = self._system.pwritev(fd, [line], 0) == line.nbytes
        self._system.fdatasync(fd)
        self._has_line = is_whole

    def _exclude(self) -> None:
        """Raise UsedElsewhere if a foreign owner lives. REQUIRES: the file was just created or renewed."""
        try:
            rival = _rival(self._system, self._root_fd, self._owner)
        except OSError:
            self.release()
            raise
        if rival is not None:
            self.release()
            raise UsedElsewhere(rival)

    def release(self) -> None:
        """Remove the file. Does nothing if there is none."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                self._system.unlink(self._name, dir_fd=self._root_fd)
            with contextlib.suppress(OSError):
                self._system.close(fd)

    def abandon(self) -> None:
        """Unlock the file, so that its owner counts as dead; in the child of a fork, close the copy of the lock."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

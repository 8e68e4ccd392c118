"""Health: whether a store does what it is for, since when it does not, why, and what an operator can do.

A store keeps nothing if new pages were offered to it and none has been STORED since: it is full and cannot evict, it
fails, or its breaker is open for writes. It fails if its breaker is open for reads. Neither silence nor a page that is
PRESENT proves anything: without new pages the last verdict stays, with its time; only a probe that stores a page takes
it back, if no page was REJECTED. The verdict comes from the calls, the breakers and their probes (see `admission`).

Page, `hicache ctl`, `/readyz` and log take their words from the one table here.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...clock import Clock
from ..base import Direction
from ..errors import ErrorKind

# Pages may be rejected or fail for a moment, as during a sweep of a full store. After this time it is not a moment, and
# it is short enough to be seen within a minute.
CONFIRM_S = 15.0

# Causes that are not kinds of errors.
REJECTED = "rejected"
SWITCHED_OFF = "switched_off"
NOT_OPEN = "not_open"
DAMAGE = "damage"  # several damaged pages in a row
BUSY = "guard_busy"

# See HealthWatch.
Off: TypeAlias = Mapping[Direction, tuple[float, str]]


class HealthState(enum.StrEnum):
    """Whether a store does what it is for."""

    WORKING = "working"
    IDLE = "idle"  # nothing is known: no call has ended yet
    KEEPS_NOTHING = "keeps_nothing"  # it does not store the pages that are written to it
    FAILING = "failing"  # its pages cannot be read
    PARTLY = "partly"  # a part of it is down, and the pages there are misses


_WORDS = {
    HealthState.KEEPS_NOTHING: "keeps nothing",
    HealthState.FAILING: "cannot be read",
    HealthState.PARTLY: "works only in part",
}


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """The health of one store. Of a problem: `since_s` is its start (wall clock, seconds), `cause` a kind of error or a
    reason above, `pages` how many pages were offered in vain since, `what` and `advice` explain it to an operator; else
    None, 0 and empty."""

    state: HealthState
    since_s: float | None = None
    cause: str = ""
    pages: int = 0
    what: str = ""
    advice: str = ""

    @property
    def is_problem(self) -> bool:
        """True if the store, or a part of it, keeps nothing or fails."""
        return self.state in _WORDS

    @property
    def words(self) -> str:
        """What the store does, without its name and the time. REQUIRES: a problem."""
        return _WORDS[self.state]


# Of a store of which nothing is known.
IDLE = StoreHealth(HealthState.IDLE)


@dataclass(frozen=True, slots=True)
class StoreProblem:
    """A problem of one store in all `namespaces` (their labels) that have it."""

    store: str
    namespaces: tuple[str, ...]
    health: StoreHealth

    def __str__(self) -> str:
        health = self.health
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(health.since_s or 0.0))
        return f"{self.store} {health.words} since {since}: {health.what}. {health.advice}."


def problem(state: HealthState, since_s: float, cause: str, pages: int = 0, detail: str = "") -> StoreHealth:
    """Return the health of a store with a problem. `since_s` is wall clock; `detail` are the store's own words for the
    cause, and after `; ` its advice."""
    general, usual = _CAUSES.get(_RAISED if cause.startswith(_RAISED) else cause, _OTHER)
    what, _, advice = (detail, "", "") if cause == NOT_OPEN else detail.partition("; ")
    what = what or general.format(cause=cause)
    if pages:
        what = f"{what} (none of {pages:,} pages was kept)"
    return StoreHealth(state, since_s, cause, pages, what, advice[:1].upper() + advice[1:] or usual)


def grouped(found: Iterable[tuple[str, str, StoreHealth]]) -> list[StoreProblem]:
    """Return the problems among stores. `found` has (store, label of its namespace, health). One problem for all
    namespaces of a store that have the same cause, from its earliest time."""
    groups: dict[tuple[str, str, str], StoreProblem] = {}
    for store, label, health in found:
        if health.is_problem:
            key = (store, health.state, health.cause)
            known = groups.get(key)
            if known is None:
                groups[key] = StoreProblem(store, (label,), health)
            else:
                first = min(known.health, health, key=lambda one: one.since_s or 0.0)
                groups[key] = replace(known, namespaces=(*known.namespaces, label), health=first)
    return list(groups.values())


@dataclass(slots=True, eq=False)
class _InVain:
    """Pages that were written and not stored, since the last page that was stored."""

    since_s: float
    pages: int = 0
    cause: str = ""
    detail: str = ""
    is_rejected: bool = False  # one of them was rejected: there may be room for a probe, but not for a page


class HealthWatch:
    """Judges the health of one store. Times are those of `clock`. `wake` is called with the time when `news` may have
    some; it must not block.

    `off` in its methods has, per direction that is off, since when and why: the reason of the breaker, or SWITCHED_OFF.
    Locking design: the owner locks (`admission`).
    """

    def __init__(self, wake: Callable[[float], None], clock: Clock) -> None:
        self._wake = wake
        self._clock = clock
        self._has_worked = False
        self._in_vain: _InVain | None = None
        self._causes: dict[Direction, str] = {}  # of the last failure
        self._logged: HealthState | None = None  # the problem that was logged last

    def worked(self) -> None:
        """Record a good call."""
        self._has_worked = True

    def failed(self, direction: Direction, cause: str) -> None:
        """Record the cause of a failed call or probe."""
        self._causes[direction] = cause

    def kept(self, time_s: float) -> None:
        """Record that a new page was stored."""
        if self._in_vain is not None:
            self._in_vain = None
            self._wake(time_s)

    def kept_nothing(self, pages: int, cause: str, detail: str, time_s: float, *, is_rejected: bool = False) -> None:
        """Record a write that stored none of its new pages. `detail` is the store's explanation of `cause`."""
        if self._in_vain is None:
            self._in_vain = _InVain(time_s)
            self._wake(time_s + CONFIRM_S)
        self._in_vain.pages += pages
        self._in_vain.is_rejected |= is_rejected
        if cause:
            self._in_vain.cause, self._in_vain.detail = cause, detail

    def probed(self, time_s: float) -> None:
        """Record that writes pass and a probe has stored a page."""
        if self._in_vain is not None and not self._in_vain.is_rejected:
            self.kept(time_s)

    def verdict(self, off: Off, time_s: float) -> StoreHealth:
        """Return the health now."""
        vain, writes, reads = self._in_vain, off.get(Direction.WRITE), off.get(Direction.READ)
        if writes is not None or (vain is not None and time_s >= vain.since_s + CONFIRM_S):
            known = vain or _InVain(time_s)
            since_s = known.since_s if writes is None else min(known.since_s, writes[0])
            cause = self._cause(Direction.WRITE, writes, known.cause)
            detail = known.detail if cause == known.cause else ""
            return problem(HealthState.KEEPS_NOTHING, self._wall(since_s, time_s), cause, known.pages, detail)
        if reads is not None:
            cause = self._cause(Direction.READ, reads, "")
            return problem(HealthState.FAILING, self._wall(reads[0], time_s), cause)
        return StoreHealth(HealthState.WORKING) if self._has_worked else IDLE

    def _wall(self, since_s: float, time_s: float) -> float:
        """Return a time of `clock`, which shows `time_s` now, as wall clock."""
        return self._clock.wall_s() - (time_s - since_s)

    def _cause(self, direction: Direction, off: tuple[float, str] | None, known: str) -> str:
        reason = "" if off is None else off[1]
        if reason in (SWITCHED_OFF, DAMAGE):
            return reason
        return known or self._causes.get(direction, reason)

    def news(self, off: Off, time_s: float) -> tuple[StoreHealth | None, float]:
        """Return the health if it must be logged now: a problem that has lasted for CONFIRM_S, or its end. Also return
        the time of the next call, infinity if only `wake` is to cause it."""
        starts = [since_s for since_s, _ in off.values()]
        if self._in_vain is not None:
            starts.append(self._in_vain.since_s)
        due = min((start + CONFIRM_S for start in starts if start + CONFIRM_S > time_s), default=math.inf)
        found, logged = self.verdict(off, time_s), self._logged
        if not found.is_problem:
            self._logged = None
        elif any(start + CONFIRM_S <= time_s for start in starts):
            self._logged = found.state
        return found if self._logged is not logged else None, due


_RAISED = "raised"  # and `raised_KeyError`
# Causes, what each means, and what an operator can do.
_TABLE: tuple[tuple[tuple[str, ...], str, str], ...] = (
    ((REJECTED,), "it is full and cannot make room",
     "Free space or use a larger volume; lower free_space_floor, raise capacity, or let the server evict"),
    ((SWITCHED_OFF,), "an operator has switched it off", "`hicache ctl bypass STORE --end` uses it again"),
    ((NOT_OPEN,), "it cannot be opened", "Correct the cause; it is opened again by itself"),
    ((ErrorKind.NO_SPACE, ErrorKind.CANNOT_PERSIST, "ENOSPC", "EDQUOT", "SQLITE_FULL"),
     "the server or the disk is full ({cause})",
     "Free space on its volume (df -h), lower capacity or raise the quota; for a server, raise its limit or set a "
     "policy that evicts"),
    ((ErrorKind.READ_ONLY, "EROFS", "SQLITE_READONLY"), "it is read-only ({cause})",
     "Mount the volume writable, or give the address of the primary server"),
    (("EACCES", "EPERM", ErrorKind.ACCESS_DENIED), "access is denied ({cause})",
     "Give this user the permission to read, write and remove; a directory must belong to the user of the process"),
    ((ErrorKind.WRONG_CREDENTIALS,), "the credentials are unknown, wrong or expired",
     "Renew the credentials that the configuration names"),
    ((ErrorKind.CLOCK_SKEW,), "the clocks of server and host differ", "Set the clock of this host"),
    ((ErrorKind.TLS,), "TLS fails",
     "Compare the certificates and the authority (ca_file) of both sides, and their dates"),
    ((ErrorKind.DNS,), "the server's name has no address", "Correct the address, or the name service"),
    ((ErrorKind.CONNECTION_REFUSED, ErrorKind.CONNECTION_LOST, ErrorKind.UNREACHABLE),
     "the server cannot be reached ({cause})",
     "Start the server, and check its address and the network; the store is used again by itself"),
    ((ErrorKind.PROTOCOL,), "its answers are wrong ({cause})", "Look for a gateway or proxy that answers instead"),
    ((ErrorKind.DEADLINE, ErrorKind.TIMEOUT, "overdue"), "calls take longer than their deadline ({cause})",
     "Look at the load of the server, the disk and the network; a longer transfer.storage_deadline helps a store that"
     " is only slow"),
    ((ErrorKind.HANGS,), "its mount hangs: calls of the system do not return",
     "Look at the file server and the network; the store is used again by itself"),
    ((BUSY, ErrorKind.BUSY, ErrorKind.THROTTLED, ErrorKind.TOO_MANY_CONNECTIONS, ErrorKind.NO_BUFFER),
     "it is overloaded ({cause})", "Use fewer engines or connections for this store, or a faster store"),
    ((ErrorKind.NO_BUCKET, ErrorKind.WRONG_REGION), "the bucket does not exist there ({cause})",
     "Create the bucket, or correct its name and region"),
    (("EIO",), "the disk reports errors (EIO)", "Look at the disk: dmesg, smartctl -a"),
    (("ESTALE",), "its directory was moved, replaced or removed", "Move it back, or `hicache ctl detach` and `attach`"),
    (("EMFILE", "ENFILE", ErrorKind.NO_THREAD), "a limit of this machine is reached ({cause})",
     "Raise the limits of open files and threads (ulimit -n, ulimit -u)"),
    ((DAMAGE, ErrorKind.CHECKSUM), "its pages fail verification, so its use is stopped for a while",
     "Compare the keys in integrity and storage_format of all engines; then `hicache ctl scrub STORE`"),
    ((_RAISED, ErrorKind.INTERNAL), "an unexpected error ({cause}), which is in the log",
     "Report it with the log, or correct your backend"),
    ((ErrorKind.TOO_LARGE,),
     "the server, or a proxy before it, limits the size of values, and pages are larger (too_large)",
     "Raise that limit, or lower page_size"),
    ((ErrorKind.UNAVAILABLE,), "the server cannot work now (unavailable)",
     "Look at its log; `hicache ctl status` says why a daemon cannot"),
    ((ErrorKind.CERTIFICATE_EXPIRED,),
     "the certificate of the server, or of this client, has expired or is not valid yet",
     "Renew it, or set the clock; `hicache doctor` shows the dates of the files of this host"),
)
_CAUSES = {str(name): (what, advice) for names, what, advice in _TABLE for name in names}
# The causes that are errors of the operating system or of SQLite, such as EROFS.
SYSTEM_CAUSES = frozenset(filter(str.isupper, _CAUSES))
_OTHER = ("its calls fail ({cause})", "docs/backends explains the errors of each store; the log may say more")

"""What the library's return codes mean: the one table in which its errors become outcomes and classes.

A call on a batch returns one number per key: 0 or a size for success, below 0 a code of Mooncake's `types.h`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

OK = 0
NO_ROOM = -200
BAD_PARAMETER = -600  # from a read: the object is longer than the buffer, among other things
BEING_WRITTEN = -703
NOT_FOUND = -704
PRESENT = -705
LEASED = -706
GONE = -712
CHECKSUM = -801
UNREADABLE = -(1 << 31)  # not of Mooncake: the library has answered something else than a number for each key

# Nothing is there to be read: it never was, was removed, or is not written to its end.
MISSES = frozenset({BEING_WRITTEN, NOT_FOUND, GONE})
# A page that cannot be removed now, and can be soon: somebody reads it, or copies it to another node.
BUSY = frozenset({LEASED, -708, -714})

# The class under which trouble is counted; a class says what to look at.
_CLASSES: Mapping[int, str] = {
    -1: "connection",  # what a client of the daemon says when the daemon does not answer
    -101: "no_segment",
    NO_ROOM: "no_room",
    BAD_PARAMETER: "parameter",
    -601: "client_expired",
    -702: "replica",
    BEING_WRITTEN: "not_ready",
    LEASED: "leased",
    -707: "lease_expired",
    -708: "leased",
    -714: "leased",
    -800: "transfer",
    CHECKSUM: "checksum",
    -900: "connection",
    -901: "timeout",
    -1010: "not_leader",
    -1011: "not_leader",
    UNREADABLE: "protocol",
}
# After one of these the next call may hang as long as the one that got it did.
_SLOW = frozenset({"connection", "timeout", "transfer", "no_segment", "replica"})


def checked(answer: object, count: int) -> list[int]:
    """The codes in what the library has answered for `count` keys, all UNREADABLE if these are not so many numbers."""
    found = list(answer) if isinstance(answer, Iterable) else []
    if len(found) != count or any(type(code) is not int for code in found):
        return [UNREADABLE] * count
    return found


def class_of(code: int) -> str:
    """The class of error of a code below 0."""
    return _CLASSES.get(code, "unknown")


def is_slow(code: int) -> bool:
    """Whether `code` says that the master, the daemon or the owner of a page may be gone or hang."""
    return code < 0 and class_of(code) in _SLOW

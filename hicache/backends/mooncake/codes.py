"""What the library's return codes mean: the one table in which its errors become outcomes and kinds.

A call on a batch returns one number per key: 0 or a size for success, below 0 a code of Mooncake's `types.h`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import ErrorKind

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
# A page that cannot be removed now, and can be soon: a client reads it, or copies it to another node.
BUSY = frozenset({LEASED, -708, -714})

# The kind under which an error is counted.
_KINDS: Mapping[int, ErrorKind] = {
    -1: ErrorKind.CONNECTION_LOST,  # what a client of the daemon says when the daemon does not answer
    -101: ErrorKind.NO_SEGMENT,
    NO_ROOM: ErrorKind.NO_SPACE,
    BAD_PARAMETER: ErrorKind.BAD_REQUEST,
    -601: ErrorKind.CLIENT_EXPIRED,
    -702: ErrorKind.NO_REPLICA,
    BEING_WRITTEN: ErrorKind.NOT_READY,
    LEASED: ErrorKind.LEASED,
    -707: ErrorKind.LEASE_EXPIRED,
    -708: ErrorKind.LEASED,
    -714: ErrorKind.LEASED,
    -800: ErrorKind.TRANSFER,
    CHECKSUM: ErrorKind.CHECKSUM,
    -900: ErrorKind.CONNECTION_LOST,
    -901: ErrorKind.TIMEOUT,
    -1010: ErrorKind.NOT_LEADER,
    -1011: ErrorKind.NOT_LEADER,
    UNREADABLE: ErrorKind.PROTOCOL,
}
# After one of these the next call may hang as long as the one that got it did.
_SLOW = frozenset({
    ErrorKind.CONNECTION_LOST, ErrorKind.TIMEOUT, ErrorKind.TRANSFER, ErrorKind.NO_SEGMENT, ErrorKind.NO_REPLICA,
})  # fmt: skip


def checked(answer: object, count: int) -> list[int]:
    """The codes in what the library has answered for `count` keys, all UNREADABLE if these are not so many numbers."""
    found = list(answer) if isinstance(answer, Iterable) else []
    if len(found) != count or any(type(code) is not int for code in found):
        return [UNREADABLE] * count
    return found


def kind_of(code: int) -> ErrorKind:
    """Return the kind of error of a code below 0."""
    return _KINDS.get(code, ErrorKind.SERVER_ERROR)


def is_slow(code: int) -> bool:
    """Whether `code` says that the master, the daemon or the owner of a page may be gone or hang."""
    return code < 0 and kind_of(code) in _SLOW

"""The meaning of the library's return codes: the table that turns its errors into error kinds.

A call on a batch returns one number per key: 0 or a size for success, or a negative code of Mooncake's `types.h`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import ErrorKind

OK = 0
NO_ROOM = -200
BAD_PARAMETER = -600  # from a read, this may mean that the object is longer than the buffer
BEING_WRITTEN = -703
NOT_FOUND = -704
PRESENT = -705
LEASED = -706
GONE = -712
CHECKSUM = -801
UNREADABLE = -(1 << 31)  # not a Mooncake code: the library did not return one number per key

# The page cannot be read: it was never stored, was removed, or is still being written.
MISSES = frozenset({BEING_WRITTEN, NOT_FOUND, GONE})
# The page cannot be removed yet: a client reads it, or copies it to another node.
BUSY = frozenset({LEASED, -708, -714})

# The error kind under which a code is counted.
_KINDS: Mapping[int, ErrorKind] = {
    -1: ErrorKind.CONNECTION_LOST,  # from a daemon's client: the daemon does not answer
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
# After one of these errors, the next call may hang.
_SLOW = frozenset({
    ErrorKind.CONNECTION_LOST, ErrorKind.TIMEOUT, ErrorKind.TRANSFER, ErrorKind.NO_SEGMENT, ErrorKind.NO_REPLICA,
})


def checked(answer: object, count: int) -> list[int]:
    """Return the codes in the library's `answer` for `count` keys; all UNREADABLE if it is not one number per key."""
    found = list(answer) if isinstance(answer, Iterable) else []
    if len(found) != count or any(type(code) is not int for code in found):
        return [UNREADABLE] * count
    return found


def kind_of(code: int) -> ErrorKind:
    """Return the error kind of a negative code."""
    return _KINDS.get(code, ErrorKind.SERVER_ERROR)


def is_slow(code: int) -> bool:
    """True if `code` means that the master, the daemon or the owner of a page may be gone or hang."""
    return code < 0 and kind_of(code) in _SLOW

"""Deleting pages that may have leases."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..errors import ErrorKind
from . import codes

# A lease ends by itself; a deletion waits for that, but not for ever for readers that renew it. The server's default is
# a lease of 10 s.
_LEASE_WAIT_S = 0.05
_LEASE_WAIT_S_MAX = 30.0


def remove_unleased(
    names: Sequence[str], deadline: float, remove: Callable[[list[str]], list[int] | str]
) -> tuple[int, list[str]]:
    """Remove pages, again and again those that have a lease; how many were there, and the classes of what went wrong.

    `remove` makes one attempt for some names and says a code for each, or one class of error for all. Blocks until
    `deadline`, or `_LEASE_WAIT_S_MAX` if that is sooner, as long as there are leases.
    """
    left = list(names)
    removed, errors = 0, list[str]()
    give_up = min(deadline, time.monotonic() + _LEASE_WAIT_S_MAX)
    while True:
        found = remove(left)
        if isinstance(found, str):
            return removed, errors + [found] * len(left)
        removed += found.count(codes.OK)
        errors += [codes.kind_of(code) for code in found if code < 0 and code not in codes.MISSES | codes.BUSY]
        left = [name for name, code in zip(left, found, strict=True) if code in codes.BUSY]
        if not left:
            return removed, errors
        if time.monotonic() + _LEASE_WAIT_S >= give_up:
            return removed, errors + [ErrorKind.LEASED] * len(left)
        time.sleep(_LEASE_WAIT_S)

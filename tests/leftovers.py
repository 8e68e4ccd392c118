"""Memory of dead engines in tests: engines and daemons of tests that run at the same time remove it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from hicache.shared_file import lock_byte
from hicache.shared_memory import PROCESSES_MAX, path_of

# Behind the bytes of members and daemons.
_GUARD = PROCESSES_MAX + 100


@contextlib.contextmanager
def guarded(name: str) -> Iterator[None]:
    """Keep the memory `name`, also after its processes have died: a file with a lock is not dead. Its next engine
    ignores this lock."""
    descriptor = os.open(path_of(name), os.O_RDWR | os.O_CLOEXEC)
    try:
        assert lock_byte(descriptor, fcntl.F_RDLCK, _GUARD)
        yield
    finally:
        os.close(descriptor)

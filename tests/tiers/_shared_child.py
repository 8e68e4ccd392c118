"""A process that opens shared host pools: `python -m tests.tiers._shared_child`. It reads commands from standard input.

A command is one line, a JSON list of a name of `COMMANDS` and its arguments. The answer is one line of JSON: the
result, or the text of the exception.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache.errors import HiCacheError
from hicache.geometry import KVGeometry
from hicache.tiers import SharedHostPool

GEOMETRY = KVGeometry(layers=3, heads=2, head_dim=8, page_size=4)
_POOLS: dict[str, SharedHostPool] = {}


def open_pool(name: str, pages: int, processes: int | None, timeout_s: float) -> list[int]:
    """Open a pool and keep it. Return its identity."""
    pool = SharedHostPool(name, GEOMETRY, pages, processes=processes, timeout_s=timeout_s)
    _POOLS[name] = pool
    return list(pool.identity)


def write(name: str, page: int, text: str) -> None:
    """Write text to the beginning of a page's payload."""
    _POOLS[name].payload(page)[: len(text)] = text.encode()


def read(name: str, page: int, count: int) -> str:
    """Return the first bytes of a page's payload as hexadecimal digits."""
    return bytes(_POOLS[name].payload(page)[:count]).hex()


def drop(name: str) -> None:
    """Release a pool."""
    del _POOLS[name]


def drop_in_a_fork(name: str) -> int:
    """Release a pool in a forked child. Return the child's exit status."""
    child = os.fork()
    if child == 0:
        drop(name)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def limit(size_bytes: int, *, stall: bool) -> None:
    """Limit the size of files that this process writes. `stall`: this process stops when a file exceeds the limit."""

    def stop(*_: object) -> None:
        print(json.dumps("stalled"), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

    if stall:
        signal.signal(signal.SIGXFSZ, stop)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def limit_memory(more_bytes: int | None) -> None:
    """Limit the memory that this process may map to `more_bytes` above its current use; None removes the limit."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft = resource.RLIM_INFINITY if more_bytes is None else pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))


COMMANDS: dict[str, Callable[..., Any]] = {
    "open": open_pool,
    "write": write,
    "read": read,
    "drop": drop,
    "drop in a fork": drop_in_a_fork,
    "limit": lambda size_bytes: limit(size_bytes, stall=False),
    "limit memory": limit_memory,
    "stall": lambda size_bytes: limit(size_bytes, stall=True),
}


def main() -> None:
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer = COMMANDS[command](*arguments)
        except HiCacheError as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    signal.alarm(120)  # the process always ends, also if the test fails
    main()

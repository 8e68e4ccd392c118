"""Free loopback ports, for servers whose port must be configured."""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from pathlib import Path

from hicache.errors import BackendUnavailable

LOOPBACK = "127.0.0.1"
# Below the kernel's range for client ports (32768 and up by default), so that a connection of another process cannot
# take a server's port during a restart.
_LOWEST, _HIGHEST = 20000, 32000
_TRIES = 1000
# Sockets whose names reserve the last ports that `free_ports` has returned: the kernel drops a name with its socket. A
# process that starts more servers at once has to be lucky.
_RESERVED: deque[int] = deque()
_RESERVED_MAX = 64
# The state of a socket in the kernel's tables.
_LISTENING = "0A"


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports. Other calls, also those of other processes, do not return them until this
    process ends or asks for 64 more. Another program may take one before the caller does: try again then.

    Raises BackendUnavailable if too few are found.
    """
    found: list[int] = []
    for _ in range(_TRIES):
        # Not the seeded generator of tests: two runs with one seed would choose the same ports.
        port = random.SystemRandom().randrange(_LOWEST, _HIGHEST)
        if port not in found and is_free(port) and _reserve(port):
            found.append(port)
        if len(found) == count:
            return found
    raise BackendUnavailable(f"fewer than {count} free ports between {_LOWEST} and {_HIGHEST}; stop some servers")


def _reserve(port: int) -> bool:
    """Return False if another call has reserved the port."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0hicache-port-{port}")
    except OSError:
        name.close()
        return False
    _RESERVED.append(name.detach())  # open until the process ends
    if len(_RESERVED) > _RESERVED_MAX:
        os.close(_RESERVED.popleft())
    return True


def is_free(port: int) -> bool:
    """Return True if a server can listen on `port` of the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers set it: connections of a previous server in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports that a process of this user listens on, on any address; empty for an unknown process."""
    return {port for _, port in listening(pid)}


def listening(pid: int) -> set[tuple[str, int]]:
    """As `listening_ports`, each with its address in the kernel's hexadecimal form."""
    try:
        sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
        lines = [line for name in ("tcp", "tcp6") for line in _table(pid, name)]
    except OSError:  # it has just ended, or closed a file
        return set()
    found = set()
    for fields in map(str.split, lines):
        if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets:
            address, _, port = fields[1].partition(":")
            found.add((address, int(port, 16)))
    return found


def _table(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]

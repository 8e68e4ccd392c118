"""Free loopback ports for servers that have to be told theirs."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

from ..errors import BackendUnavailable

LOOPBACK = "127.0.0.1"
# Below the range that the kernel takes client ports from (32768 and up by default), so that no connection of somebody
# else sits on a server's port while that is being restarted.
_LOWEST, _HIGHEST = 20000, 32000
_TRIES = 1000
# The state of a socket in the kernel's tables.
_LISTENING = "0A"


def free_ports(count: int) -> list[int]:
    """`count` different ports nobody listens on right now. Somebody may take one before the caller does: try again.

    Raises BackendUnavailable if there seem to be none.
    """
    found: list[int] = []
    for _ in range(_TRIES):
        # Not the seeded numbers of tests: two sessions with one seed would fight for the same ports.
        port = random.SystemRandom().randrange(_LOWEST, _HIGHEST)
        if port not in found and is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise BackendUnavailable(f"no {count} free ports between {_LOWEST} and {_HIGHEST}; end some servers")


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of the loopback address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier server in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def listening_ports(pid: int) -> set[int]:
    """The TCP ports that a process of this user listens on, on any address; empty if there is no such process."""
    return {port for _, port in listening(pid)}


def listening(pid: int) -> set[tuple[str, int]]:
    """As `listening_ports`, each port with its address in hexadecimal digits, as the kernel has it."""
    try:
        sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
        lines = [line for name in ("tcp", "tcp6") for line in _table(pid, name)]
    except OSError:  # it has ended, or closed one of its files meanwhile
        return set()
    found = set()
    for fields in map(str.split, lines):
        if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets:
            address, _, port = fields[1].partition(":")
            found.add((address, int(port, 16)))
    return found


def _table(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]

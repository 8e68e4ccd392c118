"""Unix sockets that only their owner can access.

A socket is in a directory of mode 0700 that belongs to this user. A lock file beside it, locked while the process runs,
shows that the socket is in use: a socket file with an unlocked lock file is a leftover and is replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from ..config.addresses import SOCKET_PATH_BYTES_MAX
from ..errors import ConfigError

BACKLOG = 512
# An engine that checks whether a daemon is dead holds its lock for microseconds.
_LOCK_TRIES = 10
_LOCK_PAUSE_S = 0.02


class PrivateSocket(contextlib.AbstractContextManager["PrivateSocket"]):
    """A listening Unix socket at `path` and its lock. A context manager that removes the socket file at its end.

    `lock` is the lock file, by default `path` with the suffix `.lock`. Creates a missing directory. Raises ConfigError,
    which begins with `what`, for a path that is too long, a directory that other users may enter, and a socket that
    another process serves.
    """

    def __init__(self, path: Path, what: str, *, lock: Path | None = None) -> None:
        self.path = path
        self._process = os.getpid()
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            most = f"{SOCKET_PATH_BYTES_MAX} bytes; choose a shorter path"
            raise ConfigError(f"{what}: {str(path)!r} is longer than {most}")
        try:
            require_private_directory(path.parent, what)
            self._lock = _hold(lock or path.with_name(f"{path.name}.lock"), what)
            try:
                self.socket = _listening(path, what)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise ConfigError(f"{what}: cannot listen at {str(path)!r}: {error.strerror}") from error

    def close(self) -> None:
        """Close and remove the socket, then release the lock. Idempotent. No effect in the child of a fork: its parent
        still serves the socket."""
        if self._lock < 0 or os.getpid() != self._process:
            return
        self.socket.close()
        with contextlib.suppress(OSError):  # removed from outside
            self.path.unlink()
        os.close(self._lock)
        self._lock = -1

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def require_private_directory(directory: Path, what: str) -> None:
    """Create `directory` and its parents with mode 0700 if missing. Raises ConfigError if it belongs to another user,
    is a link or gives other users access, and OSError."""
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    state = directory.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise ConfigError(f"{what}: {str(directory)!r} is not a directory; use a path in your own directory")
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ConfigError(
            f"{what}: the directory {str(directory)!r} must be yours and closed to other users; run chmod 700, or use "
            f"a new directory in it, such as {str(directory / 'private')!r}"
        )


def _hold(lock: Path, what: str) -> int:
    """Lock the lock file and return its descriptor. Raises ConfigError if another process holds the lock."""
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
        except OSError:
            os.close(held)
            raise
        else:
            return held
    os.close(held)
    raise ConfigError(f"{what}: another process holds {str(lock)!r}; end it, or choose another path")


def _listening(path: Path, what: str) -> socket.socket:
    """Return the listening socket. REQUIRES: the lock is held, so an existing socket file is a leftover."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{what}: {str(path)!r} exists and is not a socket; remove it, or choose another path")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener

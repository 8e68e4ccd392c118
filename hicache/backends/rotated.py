"""Passwords, tokens and certificates from files that may be replaced while this process runs.

Tools replace such a file by a rename, by writing into it, or, as Kubernetes does for all files of a Secret at once, by
moving a link on the path (`..data`) to another directory. Each of these changes the state that `os.stat` reports for
the path. So `get` asks for it at each use, which takes a few microseconds per file, and reads the files again if it
differs; no thread watches them. Use `get` where a connection, a login or a request begins: a connection stays valid
until its server closes it.

The state of a file on a network may be out of date, and its content never is. So `run` also reads the files after a
rejection.

Locking design: `_lock` is held while the files are read; `get` takes it only if their state differs. Every field is one
reference, which is replaced as a whole.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from ..config.files import require_readable
from ..errors import ConfigError
from .errors import ErrorKind, StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
# Device, inode, size and times of each file; None for one that cannot be found.
_State: TypeAlias = tuple[tuple[int, int, int, int, int] | None, ...]
# The answers to a wrong password or key. S3 does not say which of the two it is in a reply without a body.
_REJECTIONS = frozenset({ErrorKind.WRONG_CREDENTIALS, ErrorKind.ACCESS_DENIED})


class Rotated(Generic[T]):
    """The value that `load` makes of `files`, made again when one of them changes. Without files it is constant. `what`
    names it in the log.

    If `load` fails later (a file is missing, half replaced or not private), the last value stays in use, and one
    warning says why. The constructor raises what `load` raises, which is ConfigError.
    """

    def __init__(self, what: str, files: Sequence[Path | None], load: Callable[[], T]) -> None:
        self._what = what
        self._files = [file for file in files if file is not None]
        self._load = load
        self._lock = threading.Lock()
        self._seen: _State | None = self._state()  # before the files are read, so that a later change is noticed
        self._value = load()
        self._warning = ""

    def get(self) -> T:
        """Return the value of the files as they are now. Blocks while changed files are read. Thread-safe."""
        if self._state() != self._seen:
            with self._lock:
                if self._state() != self._seen:  # another thread may have read them
                    self._read()
        return self._value

    @property
    def value(self) -> T:
        """The value of the last `get`. Does not look at the files, so it does not block."""
        return self._value

    def run(self, call: Callable[[T], R]) -> R:
        """Return `call(value)`. If it raises StoreError because a server rejects the value, read the files, and call
        again if they contain another value."""
        value = self.get()
        try:
            return call(value)
        except StoreError as error:
            if error.kind not in _REJECTIONS or not self._files:
                raise
            with self._lock:
                self._read()
            if self._value is value:
                raise
        return call(self._value)

    def _read(self) -> None:
        seen = self._state()
        try:
            value = self._load()
        except ConfigError as error:
            self._seen = None  # read them again at the next use
            if str(error) != self._warning:
                self._warning = str(error)
                logger.warning("%s: a changed file cannot be used, so the last value stays in use: %s",
                               self._what, error)
            return
        self._seen, self._warning = seen, ""
        if value != self._value:
            self._value = value
            logger.info("%s: read again, because a file has changed", self._what)

    def _state(self) -> _State:
        return tuple(map(_state_of, self._files))


def _state_of(path: Path) -> tuple[int, int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def client_tls(
    what: str, files: Mapping[str, Path | None], *, check_hostname: bool = True
) -> Rotated[ssl.SSLContext]:
    """Return the TLS of a client's connections. `files` are three, by the names of their entries: the trusted
    authorities (None: those of the system), the client's certificate, and its key.

    Certificate and key must match: while only one of them is replaced, the last pair stays in use. Raises ConfigError
    for a file that cannot be read or used.
    """
    authorities, certificate, key = files.values()

    def load() -> ssl.SSLContext:
        for name, path in files.items():
            if path is not None:
                require_readable(path, f"{what}: {name}")
        try:
            context = ssl.create_default_context(cafile=authorities)
            context.check_hostname = check_hostname
            if certificate is not None:
                context.load_cert_chain(certificate, key, password=no_password)
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or error.strerror or "its content is not valid"
            names = ", ".join(name for name, path in files.items() if path is not None) or "the system's authorities"
            raise ConfigError(f"{what}: {names}: not usable for TLS ({reason}); check the PEM files") from error
        return context

    system = ssl.get_default_verify_paths().cafile if authorities is None else None
    return Rotated(what, [authorities, certificate, key, None if system is None else Path(system)], load)


def no_password() -> str:
    """The password of an encrypted key. Without it, OpenSSL would prompt on the terminal."""
    return ""

"""Values that are loaded again while this process runs: `Rotated` from files, `Refreshed` from blocking functions.

Passwords, tokens and certificates are in files that tools replace by a rename, by writing into them, or, as Kubernetes
does for all files of a Secret at once, by moving a link on the path (`..data`) to another directory. Each of these
changes the state that `os.stat` reports for the path. So `get` asks for it at each use, which takes a few microseconds
per file, and reads the files again if it differs; no thread watches them. Use `get` where a connection, a login or a
request begins: a connection stays valid until its server closes it.

The state of a file on a network may be out of date, and its content never is. So `run` also reads the files after a
rejection.

Locking design: `_lock` of a Rotated is held while the files are read; `get` takes it only if their state differs. Every
field is one reference, which is replaced as a whole. `Refreshed` has its own paragraph.
"""

from __future__ import annotations

import logging
import math
import os
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from ..background import BackgroundTask
from ..backoff import Backoff
from ..clock import SYSTEM_CLOCK, Clock
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
    names it in the log. `value` is that of the last `get`; to read it does not block.

    If `load` fails later (a file is missing, half replaced or not private), the last value stays in use, and one
    warning says why. The constructor raises what `load` raises, which is ConfigError.
    """

    def __init__(self, what: str, files: Sequence[Path | None], load: Callable[[], T]) -> None:
        self._what = what
        self._files = [file for file in files if file is not None]
        self._load = load
        self._lock = threading.Lock()
        self._seen: _State | None = self._state()  # before the files are read, so that a later change is noticed
        self.value = load()
        self._warning = ""

    def get(self) -> T:
        """Return the value of the files as they are now. Blocks while changed files are read. Thread-safe."""
        if self._state() != self._seen:
            with self._lock:
                if self._state() != self._seen:  # another thread may have read them
                    self._read()
        return self.value

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
            if self.value is value:
                raise
        return call(self.value)

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
        if value != self.value:
            self.value = value
            logger.info("%s: read again, because a file has changed", self._what)

    def _state(self) -> _State:
        return tuple(map(_state_of, self._files))


def _state_of(path: Path) -> tuple[int, int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def client_tls(what: str, files: Mapping[str, Path | None], *, check_hostname: bool = True) -> Rotated[ssl.SSLContext]:
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


class Refreshed(Generic[T]):
    """The last value of `load`, a blocking function, loaded again when it is older than `age_max_s`.

    Name resolution and requests for credentials have no deadline, so they do not run on a thread that has one: a
    BackgroundTask makes them, and other threads use the last value until then.

    `load` raises StoreError without a value. A failed refresh keeps the old value, but not one older than `usable_s`.

    Locking design: `_state` guards all fields and is not held while `load` runs or while the task is woken. It is taken
    after the lock of the task, never before.
    """

    def __init__(
        self, name: str, load: Callable[[], T], age_max_s: float, usable_s: float = math.inf,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        never = Backoff(math.inf, math.inf)  # the next `get` repeats it
        # For another error than StoreError, which the task counts and logs.
        failure = StoreError(ErrorKind.INTERNAL, f"{name} cannot be loaded")
        self._task = BackgroundTask(
            name, self._run, backoff=never, linger_s=0.0, on_error=lambda: self._settle(None, failure), clock=clock
        )
        self._clock = clock
        self._name = name
        self._load = load
        self._age_max_s, self._usable_s = age_max_s, usable_s
        self._state = threading.Condition()
        self._value: T | None = None
        self._failure: StoreError | None = None
        self._value_s = -math.inf  # when the value was loaded
        self._loaded_s = -math.inf  # when a load ended last
        self._loading = False

    def get(self, *, deadline: float) -> T:
        """Return the value. Blocks up to `deadline` if there is none that can be used. Raises StoreError."""
        with self._state:
            value = self._value if self._clock() - self._value_s <= self._usable_s else None
            if value is not None and self._clock() - self._loaded_s <= self._age_max_s:
                return value
            advance = self._task.tend if self._loading else self._task.wake
            self._loading = True
        advance()
        with self._state:
            if value is None:
                self._clock.wait_for(self._state, lambda: not self._loading, deadline)
                if not self._loading and self._failure is None:
                    value = self._value
            if value is not None:
                return value
            if self._loading or self._failure is None:
                raise StoreError(ErrorKind.TIMEOUT, f"{self._name} takes too long")
            failure = self._failure
            raise StoreError(failure.kind, failure.detail)

    def expire(self) -> None:
        """Reload the value at the next `get`; it stays in use until then."""
        with self._state:
            self._loaded_s = -math.inf

    def _run(self) -> float:
        try:
            self._settle(self._load(), None)
        except StoreError as error:
            self._settle(None, error)
        return math.inf

    def _settle(self, value: T | None, failure: StoreError | None) -> None:
        with self._state:
            if value is not None:
                self._value = value
                self._value_s = self._clock()
            self._failure = failure
            self._loaded_s = self._clock()
            self._loading = False
            self._state.notify_all()

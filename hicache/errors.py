"""Every exception that HiCache raises on purpose.

    HiCacheError
    |-- InvalidInput          (also ValueError)    a caller's argument: tokens, keys, sizes
    |   `-- WrongThread                            a call from another thread than the one that owns the cache
    |-- ConfigError           (also ValueError)    a configuration file, variable or flag
    |   `-- MissingPackage    (also ImportError)   a package that an extra brings is not installed
    |-- CapacityError         (also MemoryError)   a pool does not fit into memory, or a request into a pool
    |-- SharedMemoryError     (also OSError)       memory that processes share cannot be opened
    |-- InvariantError        (also AssertionError) an internal invariant is broken; raised by `check()`
    |-- TransferError         (also RuntimeError)  a copy between device and host failed or did not end in time
    |-- RankError             (also RuntimeError)  another rank has ended, is late, or has decided differently
    |-- AdminError                                 an operator's request cannot be carried out
    |-- SessionError                               the session cannot accept the turn
    |   |-- UnknownSession    (also LookupError)   never opened, closed or expired
    |   `-- SessionBusy                            has a turn already
    `-- BackendError          (also OSError)       storage
        |-- BackendUnavailable                     the store cannot be opened or used now
        |   `-- PageUnreadable                     one page cannot be read now; other pages may be readable
        `-- NotOurs                                the store exists but belongs to another user or program

A miss is never an exception: lookups and reads return values. Messages say what to do next. They do not contain tokens,
salts, credentials or whole keys.
"""

from __future__ import annotations


class HiCacheError(Exception):
    """The base of all exceptions that this package raises on purpose."""


class InvalidInput(HiCacheError, ValueError):
    """An argument has the wrong type, range or shape. Nothing was changed by the call."""


class WrongThread(InvalidInput):
    """The cache belongs to another thread, which has not ended. Nothing was changed by the call."""


class ConfigError(HiCacheError, ValueError):
    """A configuration is rejected. The message has the path of the bad entry, and for typos the nearest name."""


class MissingPackage(ConfigError, ImportError):
    """This use of HiCache needs a package that is not installed. The message names the extra that installs it."""


class CapacityError(HiCacheError, MemoryError):
    """A request or a pool does not fit. The message has the requested and the available amount, in bytes or tokens."""


class SharedMemoryError(HiCacheError, OSError):
    """Shared memory of this name cannot be used: its layout differs from the requested one, it is not ready in time, or
    the path holds a file that HiCache did not create. The file is unchanged.
    """


class InvariantError(HiCacheError, AssertionError):
    """A structure contradicts its own invariant: a bug in HiCache, or memory was overwritten from outside."""


class TransferError(HiCacheError, RuntimeError):
    """A device copy failed or missed its deadline. The pages of that copy must not be used; recompute them."""


class RankError(HiCacheError, RuntimeError):
    """The ranks no longer agree: one has died, stopped, missed the deadline, or decided differently.

    Not recoverable: every later call on the group raises at once. End the engine on all ranks, then restart it.
    """


class AdminError(HiCacheError):
    """An operator's request cannot be carried out. `kind` is one word for programs; the message says what to do
    instead. State is unchanged."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SessionError(HiCacheError):
    """A request cannot be a turn of a session. It can run without a session. State is unchanged."""


class UnknownSession(SessionError, LookupError):
    """No session of this name is open. Open it and send the turn again."""


class SessionBusy(SessionError):
    """The session has a turn that has not ended. A session runs one turn at a time."""


class BackendError(HiCacheError, OSError):
    """A storage backend failed in a way that its caller must see: at start, at close, or in a command line tool."""


class BackendUnavailable(BackendError):
    """The store cannot be reached, opened or written. Check address, permissions and free space, then retry."""


class PageUnreadable(BackendUnavailable):
    """One stored page cannot be read now. Other pages of the store may still be readable."""


class NotOurs(BackendError):
    """The location holds files that HiCache did not create, or other users can write to it. It is unchanged."""


def install_hint(extra: str, folder: str = ".") -> str:
    """Return how to install an extra, from a clone or from a wheel: HiCache is not on a package index. `folder` is that
    of the package in a clone."""
    return (
        f"install the extra {extra}, in a clone by pip install -e '{folder}[{extra}]', "
        f"from a wheel by pip install './NAME_OF_THE_WHEEL.whl[{extra}]'"
    )

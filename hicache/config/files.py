"""Opens files that a user names: only regular files, without waiting for another process."""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import BinaryIO

from ..errors import ConfigError

# Also `file:name`, as SQLite accepts it.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|file:", re.IGNORECASE)
OTHER_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def expanded(path: str) -> str:
    """Return `path` with a leading `~` or `~name` replaced by the home directory. Raises ValueError for an unknown
    user, and for a URL: it would name a directory such as `file:`.
    """
    if _URL.match(path):
        raise ValueError("a URL is not a path; write /a/path without a scheme, or ./ before a relative path")
    whole = os.path.expanduser(path)
    if whole.startswith("~"):
        raise ValueError(f"{path.partition('/')[0]} is not a user with a home directory; write the whole path")
    return whole


def usable(path: str) -> str:
    """Return `path` as `expanded` does. Raises ValueError also for empty text, which as a `Path` is the working
    directory, and for text that cannot be the name of a file."""
    if not path.strip():
        raise ValueError("the path is empty; write . for the working directory")
    if "\0" in path:
        raise ValueError("a path cannot contain a null byte")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError("the path has a character that is not valid in file names") from None
    return expanded(path)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Does not wait: a pipe without a writer would block, and a device may never end. Raises OSError whose `strerror`
    describes the error, also for names for which Python raises ValueError.
    """
    try:
        _require_regular(os.stat(path))  # before opening, which can change the state of a device
        return open(path, "rb", opener=_opened_regular)
    except ValueError as error:
        raise OSError(errno.EINVAL, "the name contains a null byte or half a surrogate pair") from error


def _opened_regular(path: str, _: int) -> int:
    """Return a descriptor. `open` closes it if Ctrl-C interrupts `open`: a second owner could close another file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _require_regular(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_readable(path: str | os.PathLike[str], what: str) -> None:
    """Raise ConfigError, with the name `what`, unless the file is a regular file that this process can read.

    For files that a library opens, which might wait for a pipe.
    """
    try:
        open_regular(path).close()
    except OSError as error:
        raise ConfigError(f"{what} {os.fspath(path)!r}: cannot be read: {error.strerror}") from error


def _require_regular(state: os.stat_result) -> None:
    kind = OTHER_KINDS.get(stat.S_IFMT(state.st_mode))
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")

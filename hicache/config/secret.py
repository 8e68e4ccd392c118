"""Reads keys of 32 bytes, which authenticate or encrypt stored pages, from a file or a variable.

Keep keys outside the data directory, so that others who can write pages cannot also sign or read them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError
from .files import open_regular

KEY_BYTES = 32
# The current key and, while the engines change to it, the previous one.
_KEYS_MAX = 2
_DIGITS = b"0123456789abcdefABCDEF"
_HOW_TO_MAKE = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


def read_key_file(path: Path, what: str) -> tuple[bytes, ...]:
    """Return the keys in `path`: one or two, each 64 hexadecimal digits on a line of its own, or one of 32 raw bytes.
    `what` is the file's name in errors.

    Blocks on the file system. Raises ConfigError as `read_private_file`, and if the file does not contain a key.
    """
    data = read_private_file(path, what, 1024)
    keys = (data,) if len(data) == KEY_BYTES else _from_hex(data)
    if not keys:
        raise ConfigError(f"{_named(path, what)}: is neither 64 hexadecimal digits nor 32 bytes; {_HOW_TO_MAKE}")
    return keys


def read_private_file(path: Path, what: str, bytes_max: int) -> bytes:
    """Return the first `bytes_max` bytes of a file with a secret. `what` is its name in errors.

    Blocks on the file system. Raises ConfigError if the path is not a regular file, or the file cannot be read, belongs
    to another user (except root), or is accessible to group or others. The group of a file of root may read it: so
    Kubernetes mounts a Secret (root, `fsGroup`, mode 0440), and only root chooses that group.
    """
    where = _named(path, what)
    try:
        with open_regular(path) as file:
            state = os.fstat(file.fileno())
            if state.st_mode & (0o037 if state.st_uid == 0 else 0o077):
                raise ConfigError(
                    f"{where}: mode {stat.S_IMODE(state.st_mode):04o} gives other users access; run chmod 600 (in "
                    "Kubernetes: defaultMode: 0440 and fsGroup)"
                )
            if state.st_uid not in (os.geteuid(), 0):
                raise ConfigError(f"{where}: belongs to user {state.st_uid}, not to you or root; run chown")
            return file.read(bytes_max)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error


def _named(path: Path, what: str) -> str:
    return f"{what} {os.fspath(path)!r}"


def read_keys(entry: str, place: Path | str, environ: Mapping[str, str]) -> tuple[bytes, ...]:
    """Return the keys of the entry `entry`, the current one first: from the file `place` (a path), as `read_key_file`,
    or from the variable of that name, one or two of 64 hexadecimal digits each. Raises ConfigError.
    """
    what = "encryption key" if "encryption" in entry else "MAC key"
    if isinstance(place, Path):
        return read_key_file(place, f"{what} file")
    value = environ.get(place)
    if value is None:
        raise ConfigError(f"{what} variable {place}: is not set; export it, or remove {entry} to run without that key")
    keys = _from_hex(value.encode(errors="replace"))
    if not keys:
        raise ConfigError(f"{what} variable {place}: is not 64 hexadecimal digits")
    return keys


def _from_hex(data: bytes) -> tuple[bytes, ...]:
    """Return the keys in hexadecimal digits, separated by white space; none if that is not what `data` contains."""
    texts = data.split()
    if len(texts) > _KEYS_MAX or any(len(one) != 2 * KEY_BYTES or one.strip(_DIGITS) for one in texts):
        return ()
    return tuple(bytes.fromhex(one.decode("ascii")) for one in texts)


# The most bytes of a file with a password; passwords are shorter.
_SECRET_BYTES_MAX = 4096


def read_secret(what: str, variable: str | None, path: Path | None, environ: Mapping[str, str]) -> str | None:
    """Return a password from the environment variable `variable` or the first line of the private file `path`; None if
    both are None. `what` is its name in errors.

    Blocks on the file system. Raises ConfigError if both are given, the variable is unset or empty, the file cannot be
    read or is accessible to others, or its first line is empty.
    """
    if variable is not None and path is not None:
        raise ConfigError(f"{what}: set a variable or a file, not both")
    if variable is not None:
        value = environ.get(variable)
        if not value:
            raise ConfigError(f"{what}: the environment variable {variable} is not set or empty; export it")
        try:
            value.encode()
        except UnicodeEncodeError:
            # Without the cause, because it quotes the value.
            raise ConfigError(f"{what}: the environment variable {variable} is not valid UTF-8") from None
        return value
    if path is None:
        return None
    lines = read_private_file(path, f"{what} file", _SECRET_BYTES_MAX).decode(errors="replace").splitlines()
    if not lines or not lines[0].strip():
        raise ConfigError(f"{_named(path, f'{what} file')}: is empty; write the secret into its first line")
    return lines[0].strip()

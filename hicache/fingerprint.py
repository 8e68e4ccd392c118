"""The fingerprint of a model folder. Use it for `Namespace(model=...)`, so that different weights never share a page.

It covers the names and bytes of the weight files, of the configuration files (`*.json`, because any of them may change
the forward; except those of the tokenizer) and of the model's own code (`*.py`). Hashing takes about a second per GB,
so the digest of each file is cached in the user's cache directory (`$XDG_CACHE_HOME/hicache` or `~/.cache/hicache`),
together with the file's size, inode and times. A file that was changed in the last seconds is hashed again the next
time: a second change within one tick of the file system's clock would not be visible. The cache only saves time:
without it, or if it is damaged, all bytes are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
import tempfile
import time
from pathlib import Path
from typing import TypeAlias

from .arguments import file_path
from .errors import ConfigError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# The tokenizer does not change KV: keys are computed from tokens.
_NOT_CONFIGURATION = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "special_tokens_map.json")
# The coarsest clock of a file system in use (FAT).
_TICK_NS = 2_000_000_000
# Far above the entries of any model; HiCache did not write a larger file.
_CACHE_BYTES_MAX = 8 << 20

# Device, inode, size, time of the last write and of the last change of any kind, both in ns.
_State: TypeAlias = list[int]


def model_fingerprint(folder: str | os.PathLike[str], *, cache: bool = True) -> str:
    """Return the fingerprint of the model in `folder`, 64 hexadecimal digits.

    Blocks: reads all weights, except files whose digest is in the user's cache. `cache=False` does not use the cache.
    Raises ConfigError for a folder or file that cannot be read, a folder without weights or configuration, and files
    that change while they are read; InvalidInput for a `folder` that is not a path.
    """
    path = file_path("model folder", folder)
    files = _files(path)
    cache_file = _cache_file(path) if cache else None
    known = {} if cache_file is None else _read_cache(cache_file)
    digest = hashlib.sha256(b"hicache.model")
    entries: dict[str, tuple[_State, str]] = {}
    stale = False
    for file in files:
        hashed_ns = time.time_ns()
        state, value = _file_digest(file, known.get(file.name))
        stale |= known.get(file.name) != (state, value)
        if state[3] < hashed_ns - _TICK_NS:
            entries[file.name] = (state, value)
        name = os.fsencode(file.name)
        digest.update(struct.pack("<QQ", len(name), state[2]) + name + bytes.fromhex(value))
    if stale and cache_file is not None and entries:
        _write_cache(cache_file, entries)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Return the files that the fingerprint covers, sorted by name."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"model folder {os.fspath(folder)!r}: cannot be read: {reason}") from error
    weights = [path for path in files if path.suffix in WEIGHT_SUFFIXES]
    configuration = [path for path in files if path.suffix == ".json" and path.name not in _NOT_CONFIGURATION]
    code = [path for path in files if path.suffix == ".py"]
    for found, what in ((weights, f"weights ({', '.join('*' + each for each in WEIGHT_SUFFIXES)})"),
                        (configuration, "configuration (config.json)")):  # fmt: skip
        if not found:
            raise ConfigError(f"model folder {os.fspath(folder)!r}: has no {what}; give the folder of a checkpoint")
    return sorted(weights + configuration + code)


def _file_digest(path: Path, known: tuple[_State, str] | None) -> tuple[_State, str]:
    """Return the state of a file and the SHA-256 of its bytes. Does not read the file if `known` has the same state."""
    try:
        with path.open("rb") as file:
            before = _state(file.fileno())
            if known is not None and known[0] == before:
                return known
            value = hashlib.file_digest(file, "sha256").hexdigest()
            after = _state(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if before != after:
        raise ConfigError(f"{path}: changed while it was read; wait until the model is complete")
    return after, value


def _state(descriptor: int) -> _State:
    found = os.fstat(descriptor)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _cache_file(folder: Path) -> Path | None:
    """Return the file with the digests of `folder`, or None if the user does not have a private cache directory."""
    with contextlib.suppress(OSError, RuntimeError):  # no home, or not writable
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        cache = (base if base.is_absolute() else Path.home() / ".cache") / "hicache"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = cache.stat()
        if state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()
            return cache / f"model-{name[:32]}.json"
    return None


def _read_cache(path: Path) -> dict[str, tuple[_State, str]]:
    """Return the complete entries; an empty dict if the file is missing or damaged."""
    entries = {}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        with path.open("rb") as file:
            found = json.loads(file.read(_CACHE_BYTES_MAX))
        for name, (state, value) in found.items():
            if len(bytes.fromhex(value)) == hashlib.sha256().digest_size and all(type(each) is int for each in state):
                entries[name] = (state, value)
    return entries


def _write_cache(path: Path, entries: dict[str, tuple[_State, str]]) -> None:
    """Replace the cache file atomically. Does nothing if it cannot be written."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=path.parent) as file:
        file.write(json.dumps(entries).encode())
        file.flush()
        os.replace(file.name, path)  # at its end the block then fails to remove the file; that OSError is suppressed

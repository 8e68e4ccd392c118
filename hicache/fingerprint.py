"""The fingerprint of a model folder. Use it for `Namespace(model=...)`, so that different weights never share a page.

It covers the names and bytes of the weight files, of the configuration files (`*.json`, because any of them may change
the forward; except those of the tokenizer) and of the model's own code (`*.py`). Hashing takes about a second per GB,
so the digest of each file is cached in the user's cache directory (`$XDG_CACHE_HOME/hicache` or `~/.cache/hicache`),
together with the file's size, inode and times. A file that was changed in the last seconds is hashed again the next
time: a second change within one tick of the file system's clock would not be visible. The cache only saves time:
without it, or if it is damaged, all bytes are read. The state that a trainer saves beside the weights does not count.

An engine loads weights at another time than HiCache reads their files. `loaded_fingerprint` is for such weights: it
returns a unique name if a file, or a link or folder by which it is reached, changed after a given time. It trusts the
clock of the file system, and does not detect that a file was removed, or that a renamed folder got or lost an entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import struct
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from .arguments import file_path, number
from .errors import ConfigError

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# The tokenizer does not change KV: keys are computed from tokens.
_NOT_CONFIGURATION = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "special_tokens_map.json")
# What trainers save beside the weights to continue.
_TRAINING = ("optimizer.*", "scheduler.*", "scaler.*", "training_args.*", "trainer_state.*", "rng_state*")
# The coarsest clock of a file system in use (FAT).
_TICK_NS = 2_000_000_000
# Far above the entries of any model; HiCache did not write a larger file.
_CACHE_BYTES_MAX = 8 << 20

# Device, inode, size, time of the last write and of the last change of any kind, both in ns.
_State: TypeAlias = list[int]


class FolderState(NamedTuple):
    """The size and times of each file of a model folder, and of each link by which it is reached. `changed` is the path
    among them, and among their folders, that changed last, and `changed_ns` the time. Without device and inode: some
    file systems in user space number their files again."""

    entries: dict[str, _State]
    changed: str
    changed_ns: int


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


def loaded_fingerprint(folder: str | os.PathLike[str], since_ns: int) -> str:
    """Return the fingerprint of the weights that an engine has loaded from `folder` since the wall time `since_ns`.

    If something has changed since then, the engine may have loaded other weights: return a unique name, under which no
    other process finds pages, and log what changed. Blocks and raises as `model_fingerprint`.
    """
    found, state = model_fingerprint(folder), folder_state(folder)
    if state.changed_ns < since_ns:
        return found
    logger.warning(
        "%s has changed since the engine started, which may have loaded it before: no other engine shares the pages of "
        "these weights; restart the engine", state.changed,
    )
    return f"unshared {uuid.uuid4().hex}"


def scales_fingerprint(k_scales: Sequence[float], v_scales: Sequence[float] = ()) -> str:
    """Return a fingerprint of the scales of KV, one per layer: the `kv_scales` of a namespace. Empty if all are 1.

    With MLA, `k_scales` are those of the latents. Raises InvalidInput for a scale that is not a positive number.
    """
    scales = [[number("KV scale", scale, positive=True) for scale in some] for some in (k_scales, v_scales)]
    if all(scale == 1 for some in scales for scale in some):
        return ""
    packed = [struct.pack(f"<Q{len(some)}f", len(some), *some) for some in scales]  # pools divide in float32
    return hashlib.sha256(b"hicache.scales" + b"".join(packed)).hexdigest()


def folder_state(folder: str | os.PathLike[str]) -> FolderState:
    """Return the state of the files that the fingerprint covers. Reads none of them. Raises as `model_fingerprint`."""
    entries: dict[str, _State] = {}
    times: dict[str, int] = {}

    def visit(path: Path) -> None:
        for step in (*reversed(path.parents), path):
            name = os.fspath(step)
            if name in times:
                continue
            found = step.lstat()
            if stat.S_ISDIR(found.st_mode):  # a new or removed entry changes both times, another name only the second
                times[name] = 0 if found.st_mtime_ns == found.st_ctime_ns else found.st_ctime_ns
                continue
            entries[name] = _state(found)[2:]
            times[name] = max(found.st_mtime_ns, found.st_ctime_ns)
            if times[name] % 1_000_000_000 == 0:  # the clock of the file system has whole seconds
                times[name] += _TICK_NS
            if stat.S_ISLNK(found.st_mode):
                visit(step.parent / step.readlink())

    path = file_path("model folder", folder).absolute()
    try:
        for file in _files(path):
            visit(file)
    except OSError as error:
        raise ConfigError(f"model folder {os.fspath(path)!r}: cannot be read: {error.strerror}") from error
    changed = max(times, key=times.__getitem__)
    return FolderState(entries, changed, times[changed])


def process_start_ns() -> int:
    """Return the wall time, in ns, at which this process started, rounded up to the kernel's tick."""
    ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 1) / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age_s * 1e9)


def _files(folder: Path) -> list[Path]:
    """Return the files that the fingerprint covers, sorted by name."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"model folder {os.fspath(folder)!r}: cannot be read: {reason}") from error
    code = [path for path in files if path.suffix == ".py"]
    files = [path for path in files if not any(map(path.match, _TRAINING))]
    weights = [path for path in files if path.suffix in WEIGHT_SUFFIXES]
    configuration = [path for path in files if path.suffix == ".json" and path.name not in _NOT_CONFIGURATION]
    for found, what in ((weights, f"weights ({', '.join('*' + each for each in WEIGHT_SUFFIXES)})"),
                        (configuration, "configuration (config.json)")):
        if not found:
            raise ConfigError(f"model folder {os.fspath(folder)!r}: has no {what}; give the folder of a checkpoint")
    return sorted(weights + configuration + code)


def _file_digest(path: Path, known: tuple[_State, str] | None) -> tuple[_State, str]:
    """Return the state of a file and the SHA-256 of its bytes. Does not read the file if `known` has the same state."""
    try:
        with path.open("rb") as file:
            before = _state(os.fstat(file.fileno()))
            if known is not None and known[0] == before:
                return known
            value = hashlib.file_digest(file, "sha256").hexdigest()
            after = _state(os.fstat(file.fileno()))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if before != after:
        raise ConfigError(f"{path}: changed while it was read; wait until the model is complete")
    return after, value


def _state(found: os.stat_result) -> _State:
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
    logger.info("%s: reading all weights, because this user has no private cache directory; set XDG_CACHE_HOME", folder)
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

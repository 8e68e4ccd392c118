"""Files that a user names are opened without waiting, for any kind of file at the path. Empty paths are rejected."""

from __future__ import annotations

import itertools
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pydantic import ValidationError

from hicache.backends.redis import options as redis
from hicache.backends.s3.access import open_access
from hicache.config import HiCacheConfig, files, load_config, read_key_file, read_tree
from hicache.config.entries import all_entries
from hicache.config.files import open_regular
from hicache.config.redis_storage import RedisStorageOptions
from hicache.config.s3_storage import S3StorageOptions
from hicache.config.secret import read_secret
from hicache.config.storage import STORAGE_SECTIONS
from hicache.errors import ConfigError, HiCacheError
from hicache_lab.traces.trace import read_trace

READERS: dict[str, Callable[[Path], object]] = {
    "configuration": lambda path: load_config(path, environ={}, overrides={}),
    "configuration of the demo": read_tree,
    "key": lambda path: read_key_file(path, "MAC key file"),
    "password": lambda path: read_secret("redis password", None, path, {}),
    "trace": lambda path: list(read_trace(path)),
    "certificates for Redis": lambda path: redis.open_access(RedisStorageOptions(url="rediss://h", tls_ca_file=path)),
    "certificates for S3": lambda path: open_access(S3StorageOptions(bucket="pages", ca_file=path), math.inf),
}


@pytest.fixture
def strange(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """One path for each thing that is not a readable regular file."""
    os.mkfifo(tmp_path / "pipe.yaml", 0o600)
    (tmp_path / "link").symlink_to("pipe.yaml")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        yield {
            "a pipe": tmp_path / "pipe.yaml", "a link to a pipe": tmp_path / "link", "a directory": tmp_path,
            "a socket": tmp_path / "socket", "an endless device": Path("/dev/zero"), "no bytes": Path("/dev/null"),
            "nothing": tmp_path / "none", "a loop": tmp_path / "loop", "a null byte": Path("a\0b"),
            "half a surrogate pair": Path("\ud800"), "a long name": tmp_path / ("x" * 300),
        }


@pytest.mark.parametrize("reader", READERS)
def test_a_path_that_is_not_a_regular_file_is_a_typed_error_at_once(
    strange: dict[str, Path], reader: str
) -> None:
    for name, path in strange.items():
        refusal = r"cannot be read|\.yaml|ends here|there is no|is empty|is neither|null byte|not valid in file names"
        with pytest.raises(HiCacheError, match=refusal):
            pytest.fail(f"{name} was read: {READERS[reader](path)!r}")


def test_the_error_describes_the_file_at_the_path(strange: dict[str, Path]) -> None:
    for name in ("a pipe", "a directory", "a socket"):
        with pytest.raises(OSError, match=f"it is {name}, not a regular file"):
            open_regular(strange[name])
    with pytest.raises(OSError, match="it is a device"):
        open_regular(strange["an endless device"])


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    """The control."""
    (tmp_path / "file").write_bytes(b"page_size: 16")
    (tmp_path / "link.yaml").symlink_to("file")
    assert load_config(tmp_path / "link.yaml", environ={}, overrides={}).page_size == 16


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a file that is not closed then
def test_ctrl_c_while_a_file_is_opened_is_ctrl_c(tmp_path: Path) -> None:
    """Before any of its instructions. A descriptor that is closed twice would be an OSError."""
    path, left = tmp_path / "file", 0
    path.write_bytes(b"page_size: 16")

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code.co_filename == files.__file__:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    for number in itertools.count(1):
        left = number
        sys.settrace(trace)
        try:
            open_regular(path).close()
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
    assert number > 20


@pytest.mark.parametrize("path", ["", "  ", "\0"])
@pytest.mark.parametrize("kind", STORAGE_SECTIONS)
def test_an_empty_path_is_refused_in_every_entry(tmp_path: Path, kind: str, path: str) -> None:
    file = tmp_path / "test.yaml"
    file.write_text(f"storage: {{type: {kind}, options: {{}}}}\n")
    names = [entry.name for entry in all_entries(kind) if entry.accepts == "path"]
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={}, overrides=dict.fromkeys(names, path))
    for name in names:
        assert re.search(rf"{name}: (the path is empty; write \. for|.*null byte)", str(caught.value))


def test_the_working_directory_is_a_path_if_it_is_written_as_one() -> None:
    """The control."""
    storage = {"type": "file", "options": {"path": "."}}
    assert HiCacheConfig.model_validate({"storage": storage}).storage is not None
    with pytest.raises(ValidationError, match="the path is empty"):
        HiCacheConfig.model_validate({"storage": {"type": "file", "options": {"path": ""}}})

"""`hicache copy`, `stat`, `verify`, `trim` and `purge` with stores on servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    HIT,
    NAMESPACE,
    PAYLOAD_BYTES,
    STORED,
    Subject,
    exists,
    load,
    make_keys,
    open_backend,
    store_chain,
)
from hicache_lab.devservers import DevService, SeaweedServer, Storage, ValkeyServer
from tests.cli.file_stores import subject_of
from tests.cli.test_storage_command import invoke

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES, weights_epoch=3, label="small-model")
PAGE = CODEC.frame_bytes
CHAINS = [make_keys(6, f"chain {number}") for number in range(3)]


def opened(storage: Storage) -> Subject:
    return subject_of(open_backend(storage[0], CODEC, storage[1]))


def found(storage: Storage) -> list[int]:
    """Return how many pages of each chain a store has. Read and compare each of them."""
    store = opened(storage)
    lengths = [exists(store, keys) for keys in CHAINS]
    for keys, length in zip(CHAINS, lengths, strict=True):
        assert load(store, keys[:length]) == [HIT] * length
    store.backend.close()
    return lengths


def configured(path: Path, storage: Storage) -> Path:
    """Write a configuration of the store, and return its path."""
    path.write_text(yaml.safe_dump({"storage": {"type": storage[0], "options": storage[1]}}))
    return path


def summed_up(path: Path) -> dict[str, Any]:
    result = invoke("stat", path, "--chains", "--json")
    assert result.exit_code == 0, result.stderr
    (part,) = json.loads(result.stdout)["parts"]
    return {name: part[name] for name in ("type", "pages", "bytes", "heads", "orphans", "damaged")}


@pytest.fixture
def servers(
    valkey: ValkeyServer, seaweed: SeaweedServer, login: Callable[[DevService], None], unique_prefix: str
) -> dict[str, Storage]:
    """Return a Redis and an S3 store for this test."""
    login(seaweed)
    return {"redis": valkey.storage(key_prefix=unique_prefix), "s3": seaweed.storage(prefix=unique_prefix)}


def test_pages_are_copied_from_a_directory_to_two_servers_and_managed_there(
    servers: dict[str, Storage], tmp_path: Path
) -> None:
    file: Storage = ("file", {"path": str(tmp_path / "pages")})
    store = opened(file)
    for keys in CHAINS:
        assert store_chain(store, keys) == [STORED] * 6
    store.backend.close()
    redis, s3 = (configured(tmp_path / f"{name}.yaml", storage) for name, storage in servers.items())
    for source, target in ((tmp_path / "pages", redis), (redis, s3)):
        copied = invoke("copy", source, target)
        assert (copied.exit_code, copied.stdout) == (0, "copied 18 pages, 144.0 KiB\n"), copied.stderr
        again = invoke("copy", source, target)
        assert again.stdout.endswith("  18 pages there already\n"), again.stderr
        assert invoke("verify", target).stdout == "checked 18 pages, 144.0 KiB: none damaged\n"
    for name, path in (("redis", redis), ("s3", s3)):
        assert found(servers[name]) == [6, 6, 6]
        whole = {"type": name, "pages": 18, "bytes": 18 * PAGE, "heads": 3, "orphans": 0, "damaged": 0}
        assert summed_up(path) == whole
        assert invoke("trim", path, "--to", f"{10 * PAGE}B", "--yes").exit_code == 0
        assert sum(found(servers[name])) == 10, "only whole prefixes are left"
        assert invoke("purge", path, "--epoch", "4", "--yes").stdout == "removed 0 pages, 0 B\n"
        assert invoke("purge", path, "--epoch", "3", "--yes").stdout == "removed 10 pages, 80.0 KiB\n"
        assert found(servers[name]) == [0, 0, 0]

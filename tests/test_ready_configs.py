"""The files in `configs/` do what they say: only the places are changed, to real servers and directories here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.backends.registry import BackendSpec, open_spec
from hicache.config import load_config
from hicache.errors import BackendUnavailable
from hicache.frame import FrameCodec
from hicache.integrations.options import engine_config
from hicache_lab.conformance import (
    HIT,
    NAMESPACE,
    STORED,
    empty_frames,
    full_frames,
    holds,
    make_keys,
    payload_of,
    soon,
)
from hicache_lab.devservers import (
    DevService,
    MooncakeClientDaemon,
    RedisCluster,
    RedisSentinel,
    SeaweedServer,
    ValkeyServer,
)
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from tests.backends.remote.daemon import Daemon

PAYLOAD_BYTES = 5000


def moved(repository: Path, name: str, tmp_path: Path, place: dict[str, Any] | None = None) -> Path:
    """Write a copy of a ready file: its directories are here, and its store on a server, if it has one, is at `place`.
    """
    content = yaml.safe_load((repository / "configs" / name).read_text(encoding="utf-8"))
    options = content["storage"].get("options", {})
    for number, storage in enumerate(options.get("levels") or options.get("parts") or [content["storage"]]):
        if storage["type"] in ("file", "shared_files"):
            assert "path" in storage["options"], "the ready file no longer says where"
            directory = str(tmp_path / f"pages-{number}")
            storage["options"] |= {"path": directory, "capacity": "1GiB", "free_space_floor": "0"}
        elif place is not None:
            assert set(place) <= {*storage["options"], "socket"}, "the ready file no longer says where"
            storage["options"] |= place
    path = tmp_path / name
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def carries_pages(path: Path) -> bool:
    """Whether the storage of a configuration keeps three pages, behind a guard for each store."""
    config = load_config(path, environ={}, overrides={})
    assert config.storage is not None
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=config.integrity.keys({}),
                       encryption_keys=config.storage_format.keys({}))
    backend = open_spec(BackendSpec.of(config.storage), codec)
    try:
        assert backend.stores
        keys = make_keys(3, path.name)
        backend.delete(keys, deadline=soon())
        stored = backend.batch_set(keys, full_frames(codec, keys), parent=None, deadline=soon())
        frames = empty_frames(codec, 3)
        read = backend.batch_get(keys, frames, deadline=soon())
        right = all(holds(codec, key, frame) for key, frame in zip(keys, frames, strict=True))
        return stored == [STORED] * 3 and read == [HIT] * 3 and right
    finally:
        backend.close()


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, unique_prefix: str, login: Callable[[DevService], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[dict[str, Any]]:
    """Start a server of the kind `request.param`, and set its credentials. Return the options that say where it is."""
    kind: str = request.param
    if kind == "redis":
        with ValkeyServer(password="a password") as server:
            login(server)
            yield server.storage()[1]
    elif kind == "daemon":
        with Daemon(tmp_path) as daemon:
            yield {"socket": str(daemon.socket)}
    elif kind in ("redis_cluster", "redis_sentinel"):
        group: RedisCluster | RedisSentinel = request.getfixturevalue(kind)
        monkeypatch.setenv("REDIS_PASSWORD", "")
        yield group.storage(allowed_nodes=["127.0.0.0/8"], key_prefix=unique_prefix, password_env=None)[1]
    elif kind == "mooncake":
        mooncake: MooncakeClientDaemon = request.getfixturevalue("mooncake_daemon")
        _, options = mooncake.storage()
        del options["admin"]  # the ready files leave it to the default port, which another server may have here
        yield options
    else:
        seaweed: SeaweedServer = request.getfixturevalue("seaweed")
        if kind == "s3-compatible":
            login(seaweed)
        else:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)
        prefix = {} if kind == "bucket" else {"prefix": unique_prefix}
        yield {"endpoint_url": seaweed.endpoint_url, "bucket": seaweed.bucket, **prefix}


@pytest.mark.parametrize(
    ("name", "place"),
    [("redis", "redis"), ("redis-cluster", "redis_cluster"), ("redis-sentinel", "redis_sentinel"), ("s3", "s3"),
     ("s3-compatible", "s3-compatible"), ("mooncake", "mooncake"), ("remote", "daemon"), ("levels", "bucket"),
     ("file-over-redis", "redis"), ("file-over-mooncake", "mooncake")],
    indirect=["place"],
)
def test_a_file_with_a_server_carries_pages(
    repository: Path, tmp_path: Path, name: str, place: dict[str, Any]
) -> None:
    assert carries_pages(moved(repository, f"{name}.yaml", tmp_path, place))


@pytest.mark.parametrize(
    "name",
    ["demo", "replay", "single-node-file", "vllm", "sglang", "sglang-tree", "sharded-file", "two-level-file",
     "memory-over-file", "shared-files", "file-over-shared-files"],
)
def test_a_file_with_directories_carries_pages(repository: Path, tmp_path: Path, name: str) -> None:
    assert carries_pages(moved(repository, f"{name}.yaml", tmp_path))


def test_the_files_for_engines_leave_the_page_size_to_the_engine_and_share_memory_with_a_daemon(
    repository: Path,
) -> None:
    vllm, sglang = ({"config": str(repository / f"configs/{name}.yaml")} for name in ("vllm", "sglang"))
    assert [engine_config("", vllm, block).page_size for block in (16, 48, 128)] == [64, 96, 128]
    assert engine_config("", sglang, 32, whole_page=True).page_size == 32
    assert load_config(repository / "configs/remote.yaml", environ={}).host.shared.name == "engine-0"


def plain_pages(directory: Path, name: str) -> list[Path]:
    """The files in which anyone can read a page that `carries_pages` has stored."""
    payloads = [payload_of(key, PAYLOAD_BYTES) for key in make_keys(3, name)]
    files = [path for path in directory.rglob("*") if path.is_file()]
    return [path for path in files if any(payload in path.read_bytes() for payload in payloads)]


def test_the_file_with_encrypted_pages(repository: Path, tmp_path: Path) -> None:
    """And the control: the key is what makes them unreadable."""
    key = tmp_path / "encryption.key"
    key.touch(mode=0o600)
    key.write_text("17" * 32)
    path, pages = moved(repository, "encrypted-file.yaml", tmp_path), tmp_path / "pages-0"
    text = path.read_text(encoding="utf-8")
    assert "/etc/hicache/encryption.key" in text
    path.write_text(text.replace("/etc/hicache/encryption.key", str(key)), encoding="utf-8")
    assert carries_pages(path)
    assert not plain_pages(pages, path.name)
    path.write_text(yaml.safe_dump(yaml.safe_load(text) | {"storage_format": {}}), encoding="utf-8")
    shutil.rmtree(pages)
    assert carries_pages(path)
    assert len(plain_pages(pages, path.name)) == 3


def test_pages_are_not_carried_without_their_server(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the pages above were on those servers."""
    monkeypatch.setenv("REDIS_PASSWORD", "a password")
    (port,) = free_ports(1)
    path = moved(repository, "redis.yaml", tmp_path, {"url": f"redis://{LOOPBACK}:{port}"})
    with pytest.raises(BackendUnavailable):
        carries_pages(path)

"""The files in `configs/` do what they say: only the places are changed, to real servers and directories here."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.testing import (
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
from hicache.config import load_config
from hicache.errors import BackendUnavailable
from hicache.frame import FrameCodec
from hicache.integrations.options import engine_config
from hicache.lab.devservers import (
    DevService,
    MooncakeClientDaemon,
    RedisCluster,
    RedisSentinel,
    SeaweedServer,
    ValkeyServer,
)
from hicache.lab.devservers.ports import LOOPBACK, free_ports
from tests.backends.remote.daemon import Daemon

PAYLOAD_BYTES = 5000


def moved(repository: Path, name: str, tmp_path: Path, move: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a ready file, with what `move` does to its storage's options."""
    content = yaml.safe_load((repository / "configs" / name).read_text(encoding="utf-8"))
    move(content["storage"]["options"])
    path = tmp_path / name
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def put(new: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Entries that the ready file has too, with other values."""

    def move(options: dict[str, Any]) -> None:
        assert set(new) <= set(options), "the ready file no longer says where"
        options.update(new)

    return move


def carries_pages(path: Path) -> bool:
    """Whether the storage of a configuration keeps three pages, behind a guard for each store."""
    config = load_config(path, environ={}, overrides={})
    assert config.storage is not None
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=config.integrity.keys({}),
                       encryption_keys=config.storage_format.keys({}))  # fmt: skip
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


def test_the_file_for_redis(repository: Path, tmp_path: Path, login: Callable[[DevService], None]) -> None:
    with ValkeyServer(password="a password") as server:
        _, options = server.storage()
        login(server)
        path = moved(repository, "redis.yaml", tmp_path, put(options))
        assert carries_pages(path)


def test_the_file_for_a_cluster(
    repository: Path, tmp_path: Path, redis_cluster: RedisCluster, unique_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "")
    _, options = redis_cluster.storage(allowed_nodes=["127.0.0.0/8"], key_prefix=unique_prefix, password_env=None)
    assert carries_pages(moved(repository, "redis-cluster.yaml", tmp_path, put(options)))


def test_the_file_for_sentinels(
    repository: Path, tmp_path: Path, redis_sentinel: RedisSentinel, unique_prefix: str
) -> None:
    _, options = redis_sentinel.storage(allowed_nodes=["127.0.0.0/8"], key_prefix=unique_prefix, password_env=None)
    assert carries_pages(moved(repository, "redis-sentinel.yaml", tmp_path, put(options)))


def test_the_file_for_a_bucket(
    repository: Path, tmp_path: Path, seaweed: SeaweedServer, unique_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)
    place = {"endpoint_url": seaweed.endpoint_url, "bucket": seaweed.bucket, "prefix": unique_prefix}
    assert carries_pages(moved(repository, "s3.yaml", tmp_path, put(place)))


def test_the_file_for_a_server_with_the_interface_of_s3(
    repository: Path, tmp_path: Path, seaweed: SeaweedServer, unique_prefix: str, login: Callable[[DevService], None]
) -> None:
    login(seaweed)
    place = {"endpoint_url": seaweed.endpoint_url, "bucket": seaweed.bucket, "prefix": unique_prefix}
    assert carries_pages(moved(repository, "s3-compatible.yaml", tmp_path, put(place)))


def test_the_file_for_mooncake(repository: Path, tmp_path: Path, mooncake_daemon: MooncakeClientDaemon) -> None:
    _, options = mooncake_daemon.storage()
    del options["admin"]  # the ready file leaves it to the default port, which another server may have here
    assert carries_pages(moved(repository, "mooncake.yaml", tmp_path, put(options)))


def over(tmp_path: Path, kind: str, place: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """A disk here above a store of that kind at `place`."""

    def move(options: dict[str, Any]) -> None:
        upper, lower = options["levels"]
        assert (upper["type"], lower["type"]) == ("file", kind)
        in_directory(tmp_path / "pages")(upper["options"])
        put(place)(lower["options"])

    return move


def in_directory(path: Path) -> Callable[[dict[str, Any]], None]:
    """A small store in a directory here."""

    def move(options: dict[str, Any]) -> None:
        assert "path" in options, "the ready file no longer says where"
        options |= {"path": str(path), "capacity": "1GiB", "free_space_floor": "0"}

    return move


def test_the_file_for_a_daemon(repository: Path, tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        path = moved(repository, "remote.yaml", tmp_path, lambda options: options.update(socket=str(daemon.socket)))
        assert load_config(path, environ={}).host.shared.name == "engine-0"
        assert carries_pages(path)


def test_the_file_for_vllm(repository: Path, tmp_path: Path) -> None:
    path = moved(repository, "vllm.yaml", tmp_path, in_directory(tmp_path / "pages"))
    assert [engine_config("", {"config": str(path)}, block).page_size for block in (16, 48, 128)] == [64, 96, 128]
    assert carries_pages(path)


def test_the_file_for_sglang(repository: Path, tmp_path: Path) -> None:
    path = moved(repository, "sglang.yaml", tmp_path, in_directory(tmp_path / "pages"))
    assert engine_config("", {"config": str(path)}, 32, whole_page=True).page_size == 32
    assert carries_pages(path)


def test_the_file_with_a_disk_over_a_bucket(
    repository: Path, tmp_path: Path, seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)
    place = {"endpoint_url": seaweed.endpoint_url, "bucket": seaweed.bucket}
    assert carries_pages(moved(repository, "levels.yaml", tmp_path, over(tmp_path, "s3", place)))


def test_the_file_with_a_disk_over_redis(repository: Path, tmp_path: Path, login: Callable[[DevService], None]) -> None:
    with ValkeyServer(password="a password") as server:
        _, options = server.storage()
        login(server)
        assert carries_pages(moved(repository, "file-over-redis.yaml", tmp_path, over(tmp_path, "redis", options)))


def test_the_file_with_a_disk_over_mooncake(
    repository: Path, tmp_path: Path, mooncake_daemon: MooncakeClientDaemon
) -> None:
    _, options = mooncake_daemon.storage()
    del options["admin"]
    assert carries_pages(moved(repository, "file-over-mooncake.yaml", tmp_path, over(tmp_path, "mooncake", options)))


@pytest.mark.parametrize("name", ["demo.yaml", "replay.yaml", "single-node-file.yaml"])
def test_the_file_with_a_disk(repository: Path, tmp_path: Path, name: str) -> None:
    assert carries_pages(moved(repository, name, tmp_path, in_directory(tmp_path / "pages")))


@pytest.mark.parametrize("name", ["sharded-file.yaml", "two-level-file.yaml", "memory-over-file.yaml"])
def test_the_file_with_several_stores(repository: Path, tmp_path: Path, name: str) -> None:
    def move(options: dict[str, Any]) -> None:
        for number, part in enumerate(options.get("parts") or options["levels"]):
            if part["type"] == "file":
                in_directory(tmp_path / f"pages-{number}")(part["options"])

    assert carries_pages(moved(repository, name, tmp_path, move))


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
    path = moved(repository, "encrypted-file.yaml", tmp_path, in_directory(tmp_path / "pages"))
    text = path.read_text(encoding="utf-8")
    assert "/etc/hicache/encryption.key" in text
    path.write_text(text.replace("/etc/hicache/encryption.key", str(key)), encoding="utf-8")
    assert carries_pages(path)
    assert not plain_pages(tmp_path / "pages", path.name)
    path.write_text(yaml.safe_dump(yaml.safe_load(text) | {"storage_format": {}}), encoding="utf-8")
    shutil.rmtree(tmp_path / "pages")
    assert carries_pages(path)
    assert len(plain_pages(tmp_path / "pages", path.name)) == 3


def test_pages_are_not_carried_without_their_server(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the pages above were on those servers."""
    monkeypatch.setenv("REDIS_PASSWORD", "a password")
    (port,) = free_ports(1)
    path = moved(repository, "redis.yaml", tmp_path, put({"url": f"redis://{LOOPBACK}:{port}"}))
    with pytest.raises(BackendUnavailable):
        carries_pages(path)

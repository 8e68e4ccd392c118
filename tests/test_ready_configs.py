"""The files in `configs/` for servers do what they say: only the places are changed, to those of real servers here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.backends.guard import guards_of
from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.testing import HIT, NAMESPACE, STORED, empty_frames, full_frames, holds, make_keys, soon
from hicache.config import load_config
from hicache.devservers import DevService, MooncakeClientDaemon, SeaweedServer, ValkeyServer
from hicache.devservers.ports import LOOPBACK, free_ports
from hicache.errors import BackendUnavailable
from hicache.frame import FrameCodec

CODEC = FrameCodec(NAMESPACE, 5000)


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
    storage = load_config(path, environ={}, overrides={}).storage
    assert storage is not None
    backend = open_spec(BackendSpec.of(storage), CODEC)
    try:
        assert list(guards_of(backend))
        keys = make_keys(3, path.name)
        backend.delete(keys, deadline=soon())
        stored = backend.batch_set(keys, full_frames(CODEC, keys), parent=None, deadline=soon())
        frames = empty_frames(CODEC, 3)
        read = backend.batch_get(keys, frames, deadline=soon())
        right = all(holds(CODEC, key, frame) for key, frame in zip(keys, frames, strict=True))
        return stored == [STORED] * 3 and read == [HIT] * 3 and right
    finally:
        backend.close()


def test_the_one_for_redis(repository: Path, tmp_path: Path, login: Callable[[DevService], None]) -> None:
    with ValkeyServer(password="a password") as server:
        _, options = server.storage()
        login(server)
        path = moved(repository, "redis.yaml", tmp_path, put(options))
        assert carries_pages(path)


def test_the_one_for_a_bucket(
    repository: Path, tmp_path: Path, seaweed: SeaweedServer, unique_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)
    place = {"endpoint_url": seaweed.endpoint_url, "bucket": seaweed.bucket, "prefix": unique_prefix}
    assert carries_pages(moved(repository, "s3.yaml", tmp_path, put(place)))


def test_the_one_for_mooncake(repository: Path, tmp_path: Path, mooncake_daemon: MooncakeClientDaemon) -> None:
    _, options = mooncake_daemon.storage()
    del options["admin"]  # the ready file leaves it to the default port, which another server may have here
    assert carries_pages(moved(repository, "mooncake.yaml", tmp_path, put(options)))


def test_the_one_with_a_disk_above_a_bucket(
    repository: Path, tmp_path: Path, seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)

    def move(options: dict[str, Any]) -> None:
        upper, lower = options["levels"]
        assert (upper["type"], lower["type"]) == ("file", "s3")
        upper["options"] |= {"path": str(tmp_path / "pages"), "capacity": "1GiB", "free_space_floor": "0"}
        lower["options"] |= {"endpoint_url": seaweed.endpoint_url, "bucket": seaweed.bucket}

    assert carries_pages(moved(repository, "levels.yaml", tmp_path, move))


def test_without_a_server_there_is_nothing_to_carry_them(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the pages above were on those servers."""
    monkeypatch.setenv("REDIS_PASSWORD", "a password")
    (port,) = free_ports(1)
    path = moved(repository, "redis.yaml", tmp_path, put({"url": f"redis://{LOOPBACK}:{port}"}))
    with pytest.raises(BackendUnavailable):
        carries_pages(path)

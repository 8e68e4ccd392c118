"""Backends by name: built in, from another module, and every way to get the name or the options wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.file import FileBackend
from hicache.backends.memory import MemoryBackend
from hicache.backends.registry import backend_names, open_backend
from hicache.errors import ConfigError, NotOurs

from ._files import CODEC, PAGE


def test_the_memory_backend_opens_by_name() -> None:
    backend = open_backend("memory", CODEC, {"capacity_bytes": 3 * PAGE})
    assert isinstance(backend, MemoryBackend)
    assert backend.usage().capacity_bytes == 3 * PAGE


def test_the_file_backend_opens_by_name_with_all_options(tmp_path: Path) -> None:
    options = {
        "path": str(tmp_path / "s"), "capacity_bytes": 9 * PAGE, "free_space_floor_bytes": 7, "io_threads": 3,
        "direct_io": True, "sync": True,
    }  # fmt: skip
    backend = open_backend("file", CODEC, options)
    assert isinstance(backend, FileBackend)
    assert {name: getattr(backend.options, name) for name in options} == options
    backend.close()


def test_a_class_of_another_module_opens_by_its_path() -> None:
    backend = open_backend("hicache.backends.memory:MemoryBackend", CODEC, {})
    assert isinstance(backend, MemoryBackend)


def test_built_in_names_are_listed() -> None:
    assert {"memory", "file"} <= set(backend_names())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flie", "did you mean 'file'"),
        ("memroy", "did you mean 'memory'"),
        ("zzz", "known are"),
        ("no.such.module:Class", "cannot be loaded"),
        ("hicache.backends.memory:Nothing", "cannot be loaded"),
        (":", "cannot be loaded"),
        ("hicache.backends.registry:ENTRY_POINT_GROUP", "no class or function"),
    ],
)
def test_a_wrong_name_is_refused_with_a_hint(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_backend(name, CODEC, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "x", "capasity_bytes": 5}, "did you mean 'capacity_bytes'"),
        ({"path": "x", "zzz": 5}, "it takes path"),
        ({}, "path"),
        ({"path": "x", "capacity_bytes": "many"}, "capacity_bytes"),
        ({"path": "x", "io_threads": 0}, "io_threads"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_opened(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    if "path" in options:
        options = {**options, "path": str(tmp_path / "s")}
    with pytest.raises(ConfigError, match=message):
        open_backend("file", CODEC, options)
    assert list(tmp_path.iterdir()) == []


def test_storage_trouble_keeps_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("")
    with pytest.raises(NotOurs):
        open_backend("file", CODEC, {"path": str(tmp_path)})


def not_a_backend(codec: object) -> object:
    """A factory that keeps no promise."""
    return codec


def test_a_factory_has_to_make_a_storage_backend() -> None:
    with pytest.raises(ConfigError, match="not a StorageBackend"):
        open_backend("tests.backends.test_registry:not_a_backend", CODEC, {})

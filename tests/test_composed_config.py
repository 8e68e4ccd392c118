"""The section `storage` of compositions: parts inside parts, and every way to get one wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

from hicache.backends.registry import check_backend, part_specs
from hicache.cli.config import check_surroundings, effective_yaml
from hicache.config import HiCacheConfig, load_config
from hicache.config.entries import all_entries, part_entries
from hicache.config.guard import GuardConfig
from hicache.config.storage import (
    PARTS_MAX,
    STORAGE_SECTIONS,
    FileStorage,
    FileStorageOptions,
    LevelsStorage,
    PluginStorage,
    ShardedStorage,
)
from hicache.errors import ConfigError

# The entry below `options` that lists the parts, by type of storage.
PARTS_ENTRY = {"levels": "levels", "sharded": "parts"}
Load: TypeAlias = Callable[[str], HiCacheConfig]

NESTED = """
storage:
  type: levels
  options:
    levels:
      - {type: file, options: {path: /fast, capacity: 5GiB}}
      - type: sharded
        name: remote
        options:
          parts:
            - {type: memory, name: a, guard: {in_flight: 5MiB}}
            - {type: levels, name: b, options: {levels: [{type: memory}, {type: memory}], promote: false}}
    cascade_bytes_max: 1GiB
"""


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_it(text: str) -> HiCacheConfig:
        (tmp_path / "test.yaml").write_text(text)
        return load_config(tmp_path / "test.yaml", environ={}, overrides={})

    return load_it


def storage(kind: str, parts: str, more: str = "") -> str:
    entry = PARTS_ENTRY[kind]
    return f"storage: {{type: {kind}, options: {{{entry}: [{parts}]{more}}}}}"


def test_parts_are_storage_sections_with_a_name(load: Load) -> None:
    found = load(NESTED).storage
    assert isinstance(found, LevelsStorage)
    first, second = found.options.levels
    assert isinstance(first.storage, FileStorage) and isinstance(second.storage, ShardedStorage)
    assert (first.name, second.name) == (None, "remote")
    a, b = second.storage.options.parts
    assert isinstance(a.storage, PluginStorage) and isinstance(b.storage, LevelsStorage)
    assert a.storage.guard.in_flight == 5 << 20
    assert found.options.promote and not b.storage.options.promote


def test_the_backend_gets_the_values_of_the_section(load: Load) -> None:
    found = load(NESTED).storage
    assert found is not None
    check_backend(found.type, found.options)
    parts = part_specs("levels", found.options)
    assert parts["file"].options == FileStorageOptions(path=Path("/fast"), capacity=5 << 30)
    assert list(parts) == ["file", "remote"]
    shards = part_specs("sharded", parts["remote"].options)
    assert shards["a"].guard is not None and shards["a"].guard.in_flight == 5 << 20
    assert list(part_specs("levels", shards["b"].options)) == ["memory", "memory-2"]


def test_the_effective_configuration_loads_to_an_equal_one(load: Load) -> None:
    loaded = load(NESTED)
    text = effective_yaml(loaded)
    assert load(text) == loaded
    assert yaml.safe_load(text)["storage"]["options"]["levels"][0]["options"]["capacity"] == "5GiB"


def test_a_composition_has_no_guard_and_its_parts_have_one_each(load: Load) -> None:
    found = load(NESTED).storage
    assert isinstance(found, LevelsStorage)
    assert found.guard == GuardConfig()
    with pytest.raises(ConfigError, match=r"storage\.guard\.in_flight: unknown entry"):
        load(NESTED + "  guard: {in_flight: 5MiB}\n")


MEMORY_2 = "{type: memory}, {type: memory}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (storage("levels", "{type: file, options: {path: /x, capasity: 5}}, {type: memory}"),
         "storage.options.levels.0.options.capasity: unknown entry; did you mean "
         "storage.options.levels.0.options.capacity? ("),
        (storage("levels", "{type: memory}, {type: memory, nmae: x}"),
         "storage.options.levels.1.nmae: unknown entry; did you mean storage.options.levels.1.name? ("),
        (storage("levels", "{type: memory}, {type: memory, guard: {zzz: 1}}"),
         "storage.options.levels.1.guard.zzz: unknown entry; storage.options.levels.1.guard has: in_flight, "),
        (storage("levels", MEMORY_2, ", promot: true"),
         "storage.options.promot: unknown entry; did you mean storage.options.promote? ("),
        (storage("levels", "{type: memory}, {type: file, options: {path: /x, capacity: lots}}"),
         "storage.options.levels.1.options.capacity: 'lots' is not a valid size"),
        (storage("levels", "{type: memory}, {type: file, options: {path: /x, io_threads: 0}}"),
         "storage.options.levels.1.options.io_threads: must be at least 1; got 0"),
        (storage("levels", "{type: memory}, {type: sharded, options: {parts: [{type: file, name: x}, 5]}}"),
         "storage.options.levels.1.options.parts.0.options: is missing"),
        (storage("levels", "{type: memory}, {type: sharded, options: {parts: [{type: file, name: x}, 5]}}"),
         "storage.options.levels.1.options.parts.1: is a section: write its entries (name, type, "),
        (storage("levels", "{options: {}}, {type: memory}"), "storage.options.levels.0.type: is missing"),
        (storage("levels", "{type: memory}, {type: memory}", ", promote: perhaps"),
         "storage.options.promote: expected true or false; got perhaps"),
        (storage("levels", "{type: memory}"), "storage.options.levels: expected at least 2, got 1"),
        (storage("sharded", ", ".join(["{type: memory}"] * (PARTS_MAX + 1))),
         f"storage.options.parts: expected at most {PARTS_MAX}, got {PARTS_MAX + 1}"),
        ("storage: {type: sharded, options: {parts: {type: memory}}}", "storage.options.parts: expected a list"),
        ("storage: {type: sharded}", "storage.options: is missing"),
        (storage("levels", "{type: memory, name: x}, {type: memory, name: x}"),
         "storage.options: two parts are named 'x'"),
        (storage("sharded", MEMORY_2), "storage.options: every part of a sharded set needs a name"),
        (storage("sharded", "{type: memory, name: x}, {type: memory, name: x}"), "two parts are named 'x'"),
        (storage("levels", "{type: memory}, {storage: {type: memory}}"), "storage.options.levels.1.type: is missing"),
    ],
)
def test_errors_in_a_part_are_named_with_their_path(load: Load, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(text)
    assert message in str(refused.value)
    assert "test.yaml, line 1" in str(refused.value)


def test_a_value_in_a_wrong_part_is_not_repeated_with_its_siblings(load: Load) -> None:
    """A list may hold an address with credentials; only the entry that is wrong is shown."""
    with pytest.raises(ConfigError) as refused:
        load("storage: {type: levels, options: {levels: [{type: 'mine:Store', options: {url: 'a://me:hunter2@b'}}]}}")
    assert "hunter2" not in str(refused.value)


def test_an_unknown_part_is_found_by_the_check(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"part memroy: .*did you mean 'memory'"):
        check_surroundings(load(storage("levels", "{type: memory}, {type: memroy}")))


def test_the_layers_agree_on_the_parts() -> None:
    for kind, entry in PARTS_ENTRY.items():
        options: dict[str, Any] = {entry: [{"type": "memory", "name": "a"}, {"type": "memory", "name": "b"}]}
        assert len(part_specs(kind, options)) == 2
        assert f"storage.options.{entry}" in [info.name for info in all_entries(kind)]


def test_the_entries_of_every_kind_of_storage_are_described() -> None:
    for kind in STORAGE_SECTIONS:
        entries = [entry for entry in all_entries(kind) if entry.name.startswith("storage.options.")]
        assert entries and all(len(entry.description) > 20 for entry in entries)
    assert [entry.name for entry in part_entries()] == ["name"]


def test_the_example_of_the_document_loads(load: Load) -> None:
    page = Path(__file__).resolve().parent.parent / "docs/backends/composition.md"
    (example,) = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = load(example).storage
    assert isinstance(found, LevelsStorage) and [part.name for part in found.options.levels] == ["nvme", "archive"]
    check_surroundings(load(example))

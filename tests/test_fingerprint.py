"""The fingerprint of a model folder: what it covers, and when it reads the weights again."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache import model_fingerprint
from hicache.errors import ConfigError, InvalidInput
from hicache.fingerprint import folder_state, loaded_fingerprint, process_start_ns
from tests.waiting import wait_for

# Long before now, so that digests are kept.
DAY_S = 86_400.0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hicache"


@pytest.fixture
def folder(tmp_path: Path, cache: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    put(model / "config.json", b"{}")
    put(model / "a.safetensors", bytes(1000))
    put(model / "b.safetensors", bytes(2000))
    return model


def put(path: Path, data: bytes, time_s: float = DAY_S) -> None:
    path.write_bytes(data)
    os.utime(path, (time_s, time_s))


def poison(cache: Path) -> None:
    """Have the cache say that each file holds something else."""
    (file,) = cache.iterdir()
    entries = json.loads(file.read_text())
    file.write_text(json.dumps({name: [state, "ab" * 32] for name, (state, _) in entries.items()}))


def test_an_unchanged_model_is_not_read_again(folder: Path, cache: Path) -> None:
    first = model_fingerprint(folder)
    assert len(bytes.fromhex(first)) == 32
    assert model_fingerprint(folder) == first == model_fingerprint(folder, cache=False)
    poison(cache)
    poisoned = model_fingerprint(folder)
    assert poisoned != first, "the digests come from the cache"
    assert model_fingerprint(folder, cache=False) == first
    put(folder / "b.safetensors", bytes(2000), DAY_S + 1)
    assert model_fingerprint(folder) not in (first, poisoned), "one file is read again, the others are not"


@pytest.mark.parametrize("name", ["a.safetensors", "config.json", "quantize_config.json", "model.gguf", "modeling.py"])
def test_any_byte_of_weights_and_configuration_counts(folder: Path, name: str) -> None:
    put(folder / name, b"123456")
    seen = {model_fingerprint(folder)}
    put(folder / name, b"123457", DAY_S + 0.001)  # same size, another time
    seen.add(model_fingerprint(folder))
    put(folder / name, b"1234567", DAY_S + 0.001)  # another size, same time
    seen.add(model_fingerprint(folder))
    (folder / name).rename(folder / f"other-{name}")
    seen.add(model_fingerprint(folder))
    assert len(seen) == 4


def test_a_file_that_was_written_back_in_time_is_read_again(folder: Path) -> None:
    before = model_fingerprint(folder)
    (folder / "new").write_bytes(bytes(999) + b"1")
    os.utime(folder / "new", (DAY_S, DAY_S))
    os.replace(folder / "new", folder / "a.safetensors")  # size and time are those of the old file
    assert model_fingerprint(folder) != before


def test_a_file_that_may_still_change_within_one_tick_is_not_kept(folder: Path, cache: Path) -> None:
    for path in folder.iterdir():
        path.touch()
    model_fingerprint(folder)
    assert list(cache.iterdir()) == []


def test_other_files_do_not_count(folder: Path) -> None:
    before = model_fingerprint(folder)
    for name in ("README.md", "tokenizer.json", ".gitattributes"):
        put(folder / name, b"text")
    (folder / "original").mkdir()
    assert model_fingerprint(folder) == before


def test_the_state_of_a_trainer_does_not_count(folder: Path) -> None:
    put(folder / "scheduler.py", b"code")
    before = model_fingerprint(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "trainer_state.json"):
        put(folder / name, b"state")
    assert model_fingerprint(folder) == before
    put(folder / "scheduler.py", b"other code")
    assert model_fingerprint(folder) != before


def swap(path: Path, other: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


# What changes in `linked`, and how.
CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "weights": ("real/model/a.safetensors", lambda path: path.write_bytes(b"other")),
    "configuration": ("real/model/config.json", lambda path: path.write_bytes(b"other")),
    "another folder": ("real/model", lambda path: swap(path, path.with_name("other"))),
    "another folder further up": ("real", lambda path: swap(path, path.with_name("spare"))),
    "another target of a link": ("link", lambda path: swap(path, path.with_name("next"))),
}


@pytest.fixture
def linked(folder: Path, tmp_path: Path) -> Path:
    """Return a folder with a model in `link/model`, and with others that can take its place."""
    root = tmp_path / "linked"
    for name in ("real/model", "real/other", "spare/model"):
        shutil.copytree(folder, root / name)
    (root / "link").symlink_to("real")
    (root / "next").symlink_to(root / "spare")
    return root


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_changed_after_they_may_have_been_loaded_have_a_unique_name(
    change: str, linked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, make = CHANGES[change]
    path, model = linked / name, linked / "link" / "model"
    began_ns = folder_state(model).changed_ns + 1
    assert loaded_fingerprint(model, began_ns) == model_fingerprint(model)
    wait_for(lambda: path.lstat().st_ctime_ns > began_ns, lambda: make(path))  # the clock of files has ticks
    found = [model_fingerprint(model), loaded_fingerprint(model, began_ns), loaded_fingerprint(model, began_ns)]
    assert len(set(found)) == 3
    assert f"{path.name} has changed since the engine started" in caplog.text
    assert loaded_fingerprint(model, folder_state(model).changed_ns + 1) == found[0], "an engine that starts later"


def _is_newer(path: Path, time_ns: int) -> bool:
    return path.stat().st_ctime_ns > time_ns


def test_entries_beside_the_model_do_not_change_it(linked: Path) -> None:
    model = linked / "link" / "model"
    state = folder_state(model)
    for path in (linked / "another", linked / "real" / "another", model / "README.md"):
        path.touch()
        wait_for(functools.partial(_is_newer, path, state.changed_ns), path.touch)
    assert folder_state(model).entries == state.entries and folder_state(model).changed_ns <= state.changed_ns


def test_a_process_started_after_its_parent_and_before_now() -> None:
    code = "from hicache.fingerprint import process_start_ns; import time; print(process_start_ns(), time.time_ns())"
    before_ns = time.time_ns()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    started_ns, later_ns = map(int, result.stdout.split())
    assert before_ns < started_ns < later_ns
    assert process_start_ns() < before_ns


def test_a_model_of_links_has_the_fingerprint_of_its_files(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert model_fingerprint(snapshot) == model_fingerprint(folder)


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "5", '{"a.safetensors": 5}', '{"a.safetensors": [[1], 5]}', "[" * 100_000]
)
def test_a_damaged_cache_file_is_replaced(folder: Path, cache: Path, damage: str) -> None:
    first = model_fingerprint(folder)
    (file,) = cache.iterdir()
    whole = file.read_text()
    for text in (damage, whole[: len(whole) // 2]):
        file.write_text(text)
        assert model_fingerprint(folder) == first
        assert file.read_text() == whole


def test_the_cache_directory_is_private(folder: Path, cache: Path) -> None:
    first = model_fingerprint(folder)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in cache.iterdir()] == [0o600]
    poison(cache)
    cache.chmod(0o777)  # others may have written it
    assert model_fingerprint(folder) == first


def test_an_unusable_cache_directory_is_not_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model_fingerprint(folder)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert model_fingerprint(folder) == expected


def test_folders_without_a_model_are_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none': cannot be read: No such file"):
        model_fingerprint(tmp_path / "none")
    with pytest.raises(ConfigError, match="Not a directory"):
        model_fingerprint(folder / "config.json")
    with pytest.raises(ConfigError, match="cannot be read: embedded null"):
        model_fingerprint("a\0b")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no configuration \(config\.json\)"):
        model_fingerprint(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no weights \(\*\.safetensors"):
        model_fingerprint(tmp_path / "empty")


@pytest.mark.parametrize("bad", [None, 5, b"model", ""])
def test_a_folder_that_is_not_a_path_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidInput, match=r"model folder: .* is not a path"):
        model_fingerprint(bad)


def test_it_needs_no_torch(folder: Path) -> None:
    code = "import sys, hicache; hicache.model_fingerprint(sys.argv[1]); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"

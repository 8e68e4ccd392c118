"""`hicache inspect`, `verify` and `purge` on a real file store."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hicache.backends.base import SetOutcome
from hicache.backends.file import FileBackend, FileBackendOptions
from hicache.cli.main import main
from hicache.frame import FrameCodec
from hicache.keys import page_keys, token_bytes

PAYLOAD_BYTES = 3000
MAC_KEY = bytes(range(32))
NAMESPACE = b"\x11" * 32
PAGES = 4


@dataclass(frozen=True, slots=True)
class Store:
    """A file store with `PAGES` pages of one chain."""

    root: Path
    keys: list[bytes]

    def page(self, index: int) -> Path:
        (found,) = self.root.rglob(self.keys[index].hex())
        return found

    def damage(self, index: int) -> None:
        with open(self.page(index), "r+b") as file:
            file.seek(1000)
            file.write(b"\xff\xfe\xfd")

    def pages(self) -> int:
        return sum(1 for key in self.keys for _ in self.root.rglob(key.hex()))


def make_store(root: Path, mac_key: bytes | None = None) -> Store:
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_key=mac_key)
    keys = page_keys(token_bytes(range(16 * PAGES)), 16)
    frames = [memoryview(bytearray(codec.frame_bytes)) for _ in keys]
    options = FileBackendOptions(path=root, capacity_bytes=1 << 30, free_space_floor_bytes=0)
    backend = FileBackend(codec, options)
    try:
        outcomes = backend.batch_set(keys, frames, parent=None, deadline=time.monotonic() + 30)
    finally:
        backend.close()
    assert outcomes == [SetOutcome.STORED] * PAGES
    return Store(root, keys)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store without a MAC key."""
    return make_store(tmp_path / "store")


@pytest.fixture
def mac_key_file(tmp_path: Path) -> Path:
    """A file with MAC_KEY."""
    path = tmp_path / "mac.key"
    path.write_text(MAC_KEY.hex())
    path.chmod(0o600)
    return path


def invoke(*args: str | Path, answer: str | None = None) -> Result:
    return CliRunner().invoke(main, list(map(str, args)), input=answer)


def test_inspect_shows_the_header_of_a_sound_page(store: Store) -> None:
    result = invoke("inspect", store.page(1))
    assert result.exit_code == 0
    lines = dict(line.split(":", 1) for line in result.stdout.splitlines())
    assert {name: value.strip() for name, value in lines.items()} == {
        "page": "sound",
        "file": "4.0 KiB (4096 bytes)",
        "version": "1",
        "tag": "XXH3_128",
        "payload": "3000 bytes",
        "key": store.keys[1].hex(),
        "parent": store.keys[0].hex(),
        "namespace": NAMESPACE.hex(),
    }


def test_inspect_of_a_damaged_page_says_what_is_wrong_and_fails(store: Store) -> None:
    store.damage(2)
    result = invoke("inspect", store.page(2))
    assert result.exit_code == 1 and "damaged: tag" in result.stdout


def test_inspect_of_nothing_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = invoke("inspect", tmp_path / "none")
    assert result.exit_code == 2
    assert result.stderr.startswith("hicache: ") and result.stderr.count("\n") == 1


def test_a_keyed_page_is_proved_with_the_key_alone(tmp_path: Path, mac_key_file: Path) -> None:
    keyed = make_store(tmp_path / "keyed", MAC_KEY)
    assert "sound as far as checked" in invoke("inspect", keyed.page(0)).stdout
    assert "page:        sound\n" in invoke("inspect", keyed.page(0), "--mac-key-file", mac_key_file).stdout
    assert f"{PAGES} could not be proved" in invoke("verify", keyed.root).stdout
    assert "could not" not in invoke("verify", keyed.root, "--mac-key-file", mac_key_file).stdout


def test_a_key_file_open_to_others_is_refused(store: Store, mac_key_file: Path) -> None:
    mac_key_file.chmod(0o644)
    result = invoke("verify", store.root, "--mac-key-file", mac_key_file)
    assert result.exit_code == 2 and "chmod 600" in result.stderr


def test_verify_of_a_sound_store_succeeds(store: Store) -> None:
    result = invoke("verify", store.root, "--rate", "200MiB")
    assert (result.exit_code, result.stdout) == (0, "checked 4 pages, 16.0 KiB: none damaged\n")


def test_verify_counts_damage_by_reason_and_fails(store: Store) -> None:
    store.damage(1)
    store.damage(3)
    result = invoke("verify", store.root)
    assert result.exit_code == 1
    assert "2 damaged\n  tag: 2\n" in result.stdout
    assert store.pages() == PAGES


def test_verify_removes_damage_if_told_to(store: Store) -> None:
    store.damage(1)
    result = invoke("verify", store.root, "--remove")
    assert result.exit_code == 1 and "removed 1" in result.stdout
    assert store.pages() == PAGES - 1
    assert invoke("verify", store.root).exit_code == 0


def test_verify_shows_a_bar_on_a_terminal_and_ends_with_the_verdict(store: Store) -> None:
    controller, terminal = pty.openpty()
    try:
        command = [sys.executable, "-m", "hicache", "verify", str(store.root)]
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal, timeout=60, check=False,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        )  # fmt: skip
        shown = os.read(controller, 65536).decode()
    finally:
        os.close(controller)
        os.close(terminal)
    assert result.returncode == 0 and result.stdout == b"checked 4 pages, 16.0 KiB: none damaged\n"
    assert "checking" in shown and "100%" in shown


@pytest.mark.parametrize("command", ["verify", "purge"])
def test_a_directory_that_is_no_store_is_left_alone(tmp_path: Path, command: str) -> None:
    (tmp_path / "precious").write_text("mine")
    result = invoke(command, tmp_path, *(["--yes"] if command == "purge" else []))
    assert result.exit_code == 2 and "not a HiCache file store" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_purge_asks_first_and_takes_no_for_an_answer(store: Store) -> None:
    result = invoke("purge", store.root, answer="n\n")
    assert result.exit_code == 1 and "to remove: 4 pages, 16.0 KiB" in result.stdout
    assert store.pages() == PAGES


def test_purge_without_anybody_to_ask_removes_nothing(store: Store) -> None:
    assert invoke("purge", store.root).exit_code == 1
    assert store.pages() == PAGES


@pytest.mark.parametrize(("args", "answer"), [(["--yes"], None), ([], "y\n")])
def test_purge_removes_every_page(store: Store, args: list[str], answer: str | None) -> None:
    result = invoke("purge", store.root, *args, answer=answer)
    assert result.exit_code == 0 and "removed 4 pages, 16.0 KiB" in result.stdout
    assert store.pages() == 0


def test_a_dry_run_removes_nothing(store: Store) -> None:
    result = invoke("purge", store.root, "--dry-run", "--yes")
    assert (result.exit_code, result.stdout) == (0, "to remove: 4 pages, 16.0 KiB\n")
    assert store.pages() == PAGES


def test_purge_keeps_to_the_namespace_and_the_age(store: Store) -> None:
    assert "removed 0 pages" in invoke("purge", store.root, "--namespace", "22", "--yes").stdout
    assert "removed 0 pages" in invoke("purge", store.root, "--older-than", "7d", "--yes").stdout
    assert store.pages() == PAGES
    assert "removed 4 pages" in invoke("purge", store.root, "--namespace", NAMESPACE.hex().upper(), "--yes").stdout


def test_a_rate_without_sense_is_a_usage_error(store: Store) -> None:
    result = invoke("verify", store.root, "--rate", "fast")
    assert result.exit_code == 2 and "write it like 200GiB" in result.stderr

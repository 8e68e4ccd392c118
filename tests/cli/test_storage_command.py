"""`hicache inspect`, `verify` and `purge` on a real file store."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hicache.backends.tools.verify import SPARED
from hicache.cli.main import main
from hicache.frame import FrameCodec
from hicache_lab.conformance import make_keys
from tests.cli.file_stores import fill
from tests.clocks import At

pytestmark = pytest.mark.long

PAYLOAD_BYTES = 3000
MAC_KEY = bytes(range(32))
NAMESPACE = b"\x11" * 32
PAGES = 4
STORED_S = 1_800_000_000  # 2027-01-15 08:00:00 UTC


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


def make_store(root: Path, *mac_keys: bytes) -> Store:
    codec = FrameCodec(
        NAMESPACE, PAYLOAD_BYTES, mac_keys=mac_keys, weights_epoch=7, label="a model", clock=At(STORED_S)
    )
    keys = make_keys(PAGES)
    fill(root, codec, keys)
    return Store(root, keys)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store without a MAC key."""
    return make_store(tmp_path / "store")


@pytest.fixture
def mac_key_file(tmp_path: Path) -> Path:
    """Write a file with MAC_KEY."""
    path = tmp_path / "mac.key"
    path.write_text(MAC_KEY.hex())
    path.chmod(0o600)
    return path


def invoke(*args: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, args)))


def on_a_terminal(*args: str | Path, answer: str) -> subprocess.CompletedProcess[str]:
    """Run the real command with `answer` typed on its terminal."""
    controller, terminal = pty.openpty()
    try:
        os.write(controller, answer.encode())
        command = [sys.executable, "-m", "hicache", *map(str, args)]
        return subprocess.run(command, stdin=terminal, capture_output=True, text=True, timeout=300, check=False)
    finally:
        os.close(controller)
        os.close(terminal)


def test_inspect_shows_the_header_of_a_sound_page(store: Store) -> None:
    result = invoke("inspect", store.page(1))
    assert result.exit_code == 0
    lines = dict(line.split(":", 1) for line in result.stdout.splitlines())
    assert {name: value.strip() for name, value in lines.items()} == {
        "page": "sound",
        "file": "4.0 KiB (4096 bytes)",
        "version": "3",
        "tag": "XXH3_128",
        "payload": "3000 bytes",
        "key": store.keys[1].hex(),
        "parent": store.keys[0].hex(),
        "namespace": NAMESPACE.hex(),
        "stored": "2027-01-15 08:00:00 UTC",
        "model": "a model, weights epoch 7",
    }


@pytest.mark.parametrize(("time", "words", "number"), [
    (b"\0" * 8, "unknown", None), (b"\xff" * 8, "not a valid time: 18446744073709551615", 2**64 - 1),
])
def test_inspect_shows_a_missing_and_an_impossible_time_of_storing(
    store: Store, time: bytes, words: str, number: int | None
) -> None:
    with open(store.page(1), "r+b") as file:
        file.seek(200)
        file.write(time)
    assert f"stored:      {words}\n" in invoke("inspect", store.page(1)).stdout
    assert json.loads(invoke("inspect", store.page(1), "--json").stdout)["header"]["stored_s"] == number


def test_inspect_of_no_file_is_one_line_and_exit_code_2(store: Store, tmp_path: Path) -> None:
    folder = store.page(0).parent
    for path, words in ((tmp_path / "none", "No such file"), (folder, "is a directory; pass a page file in it")):
        result = invoke("inspect", path)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert result.stderr.startswith("hicache: ") and f"{path}" in result.stderr and words in result.stderr


@pytest.mark.parametrize(("kind", "words"), [("fifo", "it is a pipe"), ("link", "it is a symbolic link"), ("text", "")])
def test_inspect_reports_a_file_that_is_not_a_page(store: Store, tmp_path: Path, kind: str, words: str) -> None:
    path = tmp_path / "thing"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(store.page(0))
    else:
        path.write_text("Dear diary")
    result = invoke("inspect", path)
    assert result.exit_code == 1
    assert result.stdout.startswith("page:        not a HiCache page: ") and words in result.stdout


def test_a_page_with_a_mac_is_verified_only_with_the_key(tmp_path: Path, mac_key_file: Path) -> None:
    keyed = make_store(tmp_path / "keyed", MAC_KEY)
    assert "sound as far as checked" in invoke("inspect", keyed.page(0)).stdout
    assert "page:        sound\n" in invoke("inspect", keyed.page(0), "--mac-key-file", mac_key_file).stdout
    assert f"{PAGES} could not be verified" in invoke("verify", keyed.root).stdout
    assert "could not" not in invoke("verify", keyed.root, "--mac-key-file", mac_key_file).stdout


def test_a_key_file_readable_by_others_is_rejected(store: Store, mac_key_file: Path) -> None:
    mac_key_file.chmod(0o644)
    result = invoke("verify", store.root, "--mac-key-file", mac_key_file)
    assert result.exit_code == 2 and "chmod 600" in result.stderr


def test_verify_counts_damage_by_reason_and_removes_it_only_with_the_option(store: Store) -> None:
    store.damage(2)
    assert "damaged: tag" in invoke("inspect", store.page(2)).stdout
    os.truncate(store.page(0), 4095)
    page = store.page(1)
    page.unlink()
    os.mkfifo(page)
    files = [store.page(index) for index in range(3)]
    for remove, left in (([], PAGES), (["--remove"], PAGES - 3)):
        result = invoke("verify", store.root, *remove)
        lines = result.stdout.splitlines()
        assert (result.exit_code, lines[0][-9:], lines[1:4]) == (1, "3 damaged", [
            "  not_regular: 1", "  size: 1", "  tag: 1",
        ])
        # Each line has the path of the page's file, which `inspect` accepts.
        assert {line.partition(":")[0].strip() for line in lines[4:7]} == {str(path) for path in files}
        assert (lines[-1], store.pages()) == ("removed 3" if remove else f"  {files[2]}: tag", left)
    assert invoke("verify", store.root).exit_code == 0


def test_verify_removes_nothing_if_most_pages_are_damaged_and_says_why(tmp_path: Path) -> None:
    """The control: purge does."""
    damaged = Store(tmp_path / "store", make_keys(16))
    fill(damaged.root, FrameCodec(NAMESPACE, PAYLOAD_BYTES), damaged.keys)
    for number in range(16):
        damaged.damage(number)
    result = invoke("verify", damaged.root, "--remove")
    assert (result.exit_code, result.stdout.splitlines()[-1], damaged.pages()) == (1, SPARED, 16)
    assert json.loads(invoke("verify", damaged.root, "--remove", "--json").stdout)["parts"][0]["spared"] == 16
    assert invoke("purge", damaged.root, "--yes").exit_code == damaged.pages() == 0


def test_pages_with_another_key_are_reported_and_kept(tmp_path: Path, store: Store, mac_key_file: Path) -> None:
    keyed = make_store(tmp_path / "keyed", MAC_KEY[::-1])
    for found, words, page in (
        (keyed, "4 pages are sealed with another MAC key", "not verified: sealed with another key than the given ones"),
        (store, "4 pages are sealed with another kind of tag", "not verified: its tag is not a MAC"),
    ):
        result = invoke("verify", found.root, "--remove", "--mac-key-file", mac_key_file)
        assert result.exit_code == 1 and "none damaged" in result.stdout and words in result.stdout
        assert "removed" not in result.stdout and found.pages() == PAGES
        result = invoke("inspect", found.page(0), "--mac-key-file", mac_key_file)
        assert result.exit_code == 1 and result.stdout.startswith(f"page:        {page}")


def test_verify_shows_a_progress_bar_on_a_terminal_and_then_the_result(store: Store) -> None:
    controller, terminal = pty.openpty()
    try:
        command = [sys.executable, "-m", "hicache", "verify", str(store.root)]
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal, timeout=300, check=False,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        )
        shown = os.read(controller, 65536).decode()
    finally:
        os.close(controller)
        os.close(terminal)
    assert result.returncode == 0 and result.stdout == b"checked 4 pages, 16.0 KiB: none damaged\n"
    assert "checking" in shown and "100%" in shown


@pytest.mark.parametrize("command", ["verify", "purge"])
def test_a_directory_that_is_not_a_store_is_not_changed(tmp_path: Path, command: str) -> None:
    (tmp_path / "precious").write_text("mine")
    result = invoke(command, tmp_path, *(["--yes"] if command == "purge" else []))
    assert result.exit_code == 2 and "not a HiCache file store" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("mode", "advice"), [(0o1777, "is not a HiCache file store"), (0o770, "run chmod 700 on it")]
)
def test_the_advice_for_a_directory_writable_by_others_depends_on_its_mode(
    tmp_path: Path, mode: int, advice: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    result = invoke("verify", shared)
    assert result.exit_code == 2 and advice in result.stderr
    assert ("chmod" in result.stderr) == (mode == 0o770)


@pytest.mark.parametrize("answer", ["n\n", "\n", "maybe\n", "\x04"])
def test_purge_asks_first_and_removes_nothing_without_a_yes(store: Store, answer: str) -> None:
    result = on_a_terminal("purge", store.root, answer=answer)
    assert (result.returncode, result.stdout) == (1, "to remove: 4 pages, 16.0 KiB\nnothing removed\n")
    assert result.stderr == "Remove them? [y/N]: "
    assert store.pages() == PAGES


@pytest.mark.parametrize("command", [["purge"], ["trim", "--to", "0"]])
def test_a_removal_without_a_terminal_needs_the_option_yes(store: Store, command: list[str]) -> None:
    result = invoke(command[0], store.root, *command[1:])
    assert result.exit_code == 2 and "pass --yes" in result.stderr
    assert store.pages() == PAGES


@pytest.mark.parametrize("way", ["--yes", "y\n"])
def test_purge_removes_every_page_including_damaged_ones(store: Store, way: str) -> None:
    store.damage(1)
    os.truncate(store.page(2), 4095)
    if way == "--yes":
        result = invoke("purge", store.root, way)
        assert (result.exit_code, result.stdout) == (0, "removed 4 pages, 16.0 KiB\n")
    else:
        asked = on_a_terminal("purge", store.root, answer=way)
        assert asked.returncode == 0 and asked.stdout.endswith("removed 4 pages, 16.0 KiB\n")
    assert store.pages() == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [(["verify", "--rate", "fast"], "write it like 200GiB"), (["purge", "--older-than", "old"], "250ms, 2h or 7d"),
     (["purge", "--older-than", "7"], "7 has no unit; write 7d, 7h, 7m, 7s or 7ms")],
)
def test_an_invalid_rate_or_age_is_a_usage_error_with_an_example(
    store: Store, args: list[str], words: str
) -> None:
    result = invoke(args[0], store.root, *args[1:])
    assert result.exit_code == 2 and words in result.stderr


def test_verify_of_the_directory_above_a_store_names_the_store(store: Store) -> None:
    result = invoke("verify", store.root.parent)
    assert result.exit_code == 2 and f"did you mean {store.root}?" in result.stderr


def test_ctrl_c_ends_verify_with_130_and_the_results_so_far(store: Store) -> None:
    store.damage(0)
    # A process inherits an ignored SIGINT, for example from a background job of a shell.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from hicache.cli.main import main; main()"
    )
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", code, "verify", str(store.root), "--rate", "1B"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal) as process:
        shown = b""
        while b"4.0 KiB" not in shown:  # the first page is read; the next one is hours away
            shown += os.read(controller, 65536)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    shown += os.read(controller, 65536)
    os.close(controller)
    os.close(terminal)
    assert process.returncode == 130 and b"Traceback" not in shown
    assert output.startswith(b"checked 1 page, 4.0 KiB: ")
    assert b"interrupted; the results above are incomplete" in shown

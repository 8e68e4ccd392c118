"""`hicache ls`, `stat`, `copy`, `trim` and `purge` on real stores, with one and with several parts."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.frame import FrameCodec
from hicache_lab.conformance import HIT, STORED, Subject, exists, load, make_keys, open_backend, store_chain
from tests.backends._files import open_stored
from tests.cli.file_stores import fill, opened, subject_of
from tests.cli.test_storage_command import invoke

pytestmark = pytest.mark.long

PAYLOAD_BYTES = 3000
PAGE = 4096
DAY_S = 86_400.0
OLD, NEW, OTHER = (bytes([number]) * 32 for number in (0x11, 0x12, 0x22))
CODECS = {
    OLD: FrameCodec(OLD, PAYLOAD_BYTES, weights_epoch=3, label="small-model"),
    NEW: FrameCodec(NEW, PAYLOAD_BYTES, weights_epoch=4, label="small-model"),
    OTHER: FrameCodec(OTHER, PAYLOAD_BYTES, weights_epoch=3, label="an-other-model-with-quite-a-long-name"),
}
KEYS = make_keys(4)


@dataclass(frozen=True, slots=True)
class Stores:
    """Directories of file stores, by name."""

    folder: Path

    def root(self, name: str) -> Path:
        return self.folder / name

    def open(self, name: str, namespace: bytes = OLD) -> Subject:
        return opened(self.root(name), CODECS[namespace])

    def fill(self, name: str, namespace: bytes, keys: list[bytes], *, age_s: float = 0.0) -> None:
        """Store a chain that was last used so long ago."""
        fill(self.root(name), CODECS[namespace], keys)
        if age_s:
            raw = open_stored(path=self.root(name))
            pages = {page.key: page for page in raw.pages(namespace.hex())}
            for parent, key in zip([None, *keys], keys, strict=False):
                data = raw.read(pages[key], PAGE)
                assert data is not None and raw.remove([pages[key]]) == 1
                page = type(pages[key])(namespace, key, PAGE, time.time() - age_s)
                assert raw.write(page, data, parent)
            raw.close()

    def found(self, name: str, namespace: bytes, keys: list[bytes]) -> int:
        store = self.open(name, namespace)
        count = exists(store, keys)
        assert load(store, keys[:count]) == [HIT] * count
        store.backend.close()
        return count

    def configured(self, **storage: Any) -> Path:
        path = self.folder / "store.yaml"
        path.write_text(yaml.safe_dump({"storage": storage}))
        return path

    def levels(self, *names: str) -> Path:
        parts = [{"type": "file", "name": name, "options": {"path": str(self.root(name))}} for name in names]
        return self.configured(type="levels", options={"levels": [{"type": "memory"}, *parts]})

    def damage(self, name: str, key: bytes) -> None:
        (page,) = self.root(name).rglob(key.hex())
        with page.open("r+b") as file:
            file.seek(1000)
            file.write(b"\xff\xfe\xfd")


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    """Return a store `a` with three namespaces: 4 pages of today, 4 of 10 days ago, 2 of 40 days ago."""
    stores = Stores(tmp_path)
    stores.fill("a", OLD, KEYS, age_s=10 * DAY_S)
    stores.fill("a", NEW, KEYS)
    stores.fill("a", OTHER, KEYS[:2], age_s=40 * DAY_S)
    return stores


def as_json(*args: str | Path) -> list[dict[str, Any]]:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)["parts"]
    return found


def test_ls_shows_the_namespaces(stores: Stores) -> None:
    result = invoke("ls", stores.root("a"))
    assert result.exit_code == 0
    lines = [re.sub(r"\b[0-9]+s ago", "now", " ".join(line.split())) for line in result.stdout.splitlines()]
    assert lines == [
        "NAMESPACE PAGES SIZE EPOCH USED",
        "111111111111 4 16.0 KiB 3 10d ago",
        "small-model, payload 2.9 KiB, XXH3_128, plain",
        "121212121212 4 16.0 KiB 4 now",
        "small-model, payload 2.9 KiB, XXH3_128, plain",
        "222222222222 2 8.0 KiB 3 40d ago",
        "an-other-model-with-quite-a-long, payload 2.9 KiB, XXH3_128, plain",
    ]


def test_ls_of_a_namespace_and_as_json_has_plain_numbers(stores: Stores) -> None:
    (part,) = as_json("ls", stores.root("a"), "--namespace", "12")
    (found,) = part["namespaces"]
    assert found.pop("oldest_use") <= found.pop("newest_use") <= time.time()
    assert found == {
        "namespace": NEW.hex(), "label": "small-model", "weights_epoch": 4, "payload_bytes": PAYLOAD_BYTES,
        "tags": ["XXH3_128"], "encodings": ["plain"], "pages": 4, "bytes": 4 * PAGE,
    }


def test_ls_of_pages_shows_the_parent_of_each(stores: Stores) -> None:
    result = invoke("ls", stores.root("a"), "--pages", "--namespace", "22")
    rows = sorted(line.split()[1:3] for line in result.stdout.splitlines()[1:])
    assert rows == sorted([[KEYS[0].hex()[:16], "-"], [KEYS[1].hex()[:16], KEYS[0].hex()[:12]]])
    (part,) = as_json("ls", stores.root("a"), "--pages", "--namespace", "22")
    parents = {page["key"]: page["parent"] for page in part["pages"]}
    assert parents == {KEYS[0].hex(): None, KEYS[1].hex(): KEYS[0].hex()}


def test_ls_reports_a_namespace_without_a_sound_page(stores: Stores) -> None:
    for key in KEYS[:2]:
        path = stores.root("a") / OTHER.hex() / key.hex()[:2] / key.hex()
        path.write_bytes(bytes(PAGE))
    result = invoke("ls", stores.root("a"), "--namespace", "22")
    assert result.exit_code == 0 and "all checked pages are damaged" in result.stdout
    (part,) = as_json("ls", stores.root("a"), "--pages", "--namespace", "22")
    assert [page["damaged"] for page in part["pages"]] == [True, True]


def test_an_empty_store_has_no_pages(stores: Stores) -> None:
    stores.open("empty").backend.close()
    assert invoke("ls", stores.root("empty")).stdout == "no pages\n"
    assert invoke("stat", stores.root("empty")).stdout.startswith("file: 0 namespaces, 0 pages, 0 B\n")


def test_stat_sums_up_by_age_and_by_namespace(stores: Stores) -> None:
    result = invoke("stat", stores.root("a"))
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "file: 3 namespaces, 10 pages, 40.0 KiB"
    assert "under 1 h 16.0 KiB 40.0 % ############" in lines
    assert "under 30 d 16.0 KiB 40.0 % ############" in lines
    assert "older 8.0 KiB 20.0 % ######" in lines
    assert "orphans" not in result.stdout


def test_stat_of_a_store_whose_pages_have_no_bytes(stores: Stores) -> None:
    stores.fill("cut", NEW, KEYS[:1])
    (path,) = stores.root("cut").rglob(KEYS[0].hex())
    path.write_bytes(b"")
    result = invoke("stat", stores.root("cut"), "--chains")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "file: 1 namespace, 1 page, 0 B")
    assert "1 page without a sound header" in result.stdout


def test_stat_counts_chains_and_orphans(stores: Stores) -> None:
    (before,) = as_json("stat", stores.root("a"), "--chains")
    assert (before["heads"], before["tails"], before["orphans"], before["damaged"]) == (3, 3, 0, 0)
    store = stores.open("a", NEW)
    store.backend.delete([KEYS[1]], deadline=time.monotonic() + 30)
    store.backend.close()
    (after,) = as_json("stat", stores.root("a"), "--chains")
    assert (after["heads"], after["tails"], after["orphans"]) == (3, 4, 1)
    shown = invoke("stat", stores.root("a"), "--chains").stdout
    assert "1 page (11.1 %) with no parent in this part" in shown


def test_a_configuration_names_the_store_and_its_capacity(stores: Stores) -> None:
    path = stores.configured(type="file", options={"path": str(stores.root("a")), "capacity": "1MiB"})
    (part,) = as_json("stat", path)
    assert (part["type"], part["pages"], part["capacity_bytes"]) == ("file", 10, 1 << 20)
    assert "capacity  1.0 MiB, 3.9 % used" in invoke("stat", path).stdout


def test_credentials_of_another_store_in_the_environment_are_not_typos(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stores.configured(type="file", options={"path": str(stores.root("none"))})
    monkeypatch.setenv("HICACHE_S3_SECRET_KEY", "of another store")
    monkeypatch.setenv("HICACHE_STORAGE__OPTIONS__PATH", str(stores.root("a")))
    (part,) = as_json("stat", path)
    assert part["pages"] == 10
    monkeypatch.setenv("HICACHE_STORAGE__OPTIONS__PTAH", str(stores.root("a")))
    assert "did you mean storage.options.path?" in invoke("stat", path).stderr


def test_each_part_of_a_composition_is_shown_and_one_can_be_chosen(stores: Stores) -> None:
    stores.fill("b", NEW, KEYS[:3])
    path = stores.levels("a", "b")
    assert [(part["part"], len(part["namespaces"])) for part in as_json("ls", path)] == [("a", 3), ("b", 1)]
    (part,) = as_json("stat", path, "--part", "b")
    assert (part["part"], part["pages"]) == ("b", 3)
    result = invoke("ls", path, "--part", "c")
    assert result.exit_code == 2 and "has no part 'c'; it has: a, b" in result.stderr


def test_nested_parts_are_shown_with_their_path(stores: Stores) -> None:
    names = ("b", "c")
    shards = [{"type": "file", "name": name, "options": {"path": str(stores.root(name))}} for name in names]
    low = {"type": "sharded", "name": "low", "options": {"parts": shards}}
    top = {"type": "file", "name": "top", "options": {"path": str(stores.root("a"))}}
    path, many = stores.configured(type="levels", options={"levels": [top, low]}), make_keys(20)
    backend = open_backend("sharded", CODECS[NEW], {"parts": shards})
    assert store_chain(subject_of(backend), many) == [STORED] * 20
    backend.close()
    found = {part["part"]: part["pages"] for part in as_json("stat", path)}
    assert list(found) == ["top", "low/b", "low/c"] and found["low/b"] + found["low/c"] == 20
    (part,) = as_json("ls", path, "--part", "low/c")
    assert part["namespaces"][0]["pages"] == found["low/c"]


def test_a_part_that_cannot_be_listed_does_not_hide_the_others(stores: Stores) -> None:
    path = stores.levels("a", "missing")
    result = invoke("ls", path)
    assert result.exit_code == 2
    assert "a: 3 namespaces" in result.stdout and "hicache: part missing: " in result.stderr


@pytest.mark.parametrize("args", [["ls"], ["stat"], ["trim", "--to", "1B", "--yes"], ["verify"], ["purge", "--yes"]])
def test_a_store_that_is_missing_or_cannot_be_listed_is_one_line_and_exit_code_2(
    stores: Stores, args: list[str]
) -> None:
    """It must not look like an empty or an undamaged one."""
    empty = stores.folder / "empty.yaml"
    empty.write_text("page_size: 64\n")
    memory = stores.configured(type="levels", options={"levels": [{"type": "memory"}, {"type": "memory"}]})
    for store, words in (
        (stores.folder / "none", "check the path"), (empty, "has no section `storage`"),
        (memory, "all parts of the store are memory"),
    ):
        result = invoke(args[0], store, *args[1:])
        assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1


def test_copy_makes_an_equal_store_and_a_second_copy_does_nothing(stores: Stores) -> None:
    result = invoke("copy", stores.root("a"), stores.root("b"))
    assert (result.exit_code, result.stdout) == (0, "copied 10 pages, 40.0 KiB\n")
    assert as_json("ls", stores.root("a")) == as_json("ls", stores.root("b"))
    for namespace, count in ((OLD, 4), (NEW, 4), (OTHER, 2)):
        assert stores.found("b", namespace, KEYS) == count
    result = invoke("copy", stores.root("a"), stores.root("b"))
    assert (result.exit_code, result.stdout) == (0, "copied 0 pages, 0 B\n  10 pages there already\n")


def test_a_dry_copy_creates_nothing(stores: Stores) -> None:
    result = invoke("copy", stores.root("a"), stores.root("b"), "--dry-run", "--namespace", "1")
    assert (result.exit_code, result.stdout) == (0, "to copy: 8 pages, 32.0 KiB\n")
    assert not stores.root("b").exists()


def test_a_copy_skips_damaged_pages_and_pages_behind_them(stores: Stores) -> None:
    (path,) = (stores.root("a") / NEW.hex()).rglob(KEYS[1].hex())
    path.write_bytes(path.read_bytes()[:1000].ljust(PAGE, b"\xff"))
    result = invoke("copy", stores.root("a"), stores.root("b"), "--namespace", "12")
    assert (result.exit_code, result.stdout.splitlines()) == (1, [
        "copied 1 page, 4.0 KiB", "  1 page damaged and skipped", "  2 pages skipped because the page before it was",
    ])
    assert stores.found("b", NEW, KEYS) == 1


def test_a_copy_into_a_small_store_keeps_whole_prefixes(stores: Stores) -> None:
    room = (1 << 20) // PAGE
    keys = make_keys(room + 2)
    stores.fill("long", NEW, keys)
    stores.open("b").backend.close()
    path = stores.configured(type="file", options={"path": str(stores.root("b")), "capacity": "1MiB",
                                                   "free_space_floor": 0})
    result = invoke("copy", stores.root("long"), path, "--namespace", "12")
    assert result.exit_code == 1 and "1 page rejected" in result.stdout
    assert stores.found("b", NEW, keys) == room


def test_a_copy_into_a_composition_asks_which_part(stores: Stores) -> None:
    stores.open("b").backend.close()
    path = stores.levels("a", "b")
    result = invoke("copy", stores.root("a"), path)
    assert result.exit_code == 2 and "choose one with --to-part" in result.stderr
    assert invoke("copy", path, path, "--part", "a", "--to-part", "b").exit_code == 0
    assert stores.found("b", OTHER, KEYS) == 2


def test_trim_removes_the_tails_of_the_oldest_chains(stores: Stores) -> None:
    dry = invoke("trim", stores.root("a"), "--to", f"{7 * PAGE}B", "--dry-run")
    assert (dry.exit_code, dry.stdout) == (0, "to remove: 3 pages, 12.0 KiB\n")
    result = invoke("trim", stores.root("a"), "--to", f"{7 * PAGE}B", "--yes")
    assert (result.exit_code, result.stdout) == (0, "removed 3 pages, 12.0 KiB; 28.0 KiB left\n")
    assert [stores.found("a", namespace, KEYS) for namespace in (OTHER, OLD, NEW)] == [0, 3, 4]
    assert invoke("trim", stores.root("a"), "--to", "1GiB", "--yes").stdout.startswith("removed 0 pages")


def test_purge_of_an_epoch_removes_only_its_namespaces(stores: Stores) -> None:
    assert invoke("purge", stores.root("a"), "--epoch", "3", "--dry-run").stdout == "to remove: 6 pages, 24.0 KiB\n"
    assert invoke("purge", stores.root("a"), "--epoch", "3", "--yes").stdout == "removed 6 pages, 24.0 KiB\n"
    assert [stores.found("a", namespace, KEYS) for namespace in (OTHER, OLD, NEW)] == [0, 0, 4]


def test_purge_removes_pages_of_all_parts_or_of_the_named_one(stores: Stores) -> None:
    stores.fill("b", NEW, KEYS)
    path = stores.levels("a", "b")
    assert invoke("purge", path, "--part", "b", "--older-than", "7d", "--yes").stdout.startswith("removed 0 pages")
    assert invoke("purge", path, "--older-than", "7d", "--yes").stdout == "removed 6 pages, 24.0 KiB\n"
    assert invoke("purge", path, "--namespace", NEW.hex().upper(), "--yes").stdout == "removed 8 pages, 32.0 KiB\n"


@pytest.mark.parametrize("prefix", ["", "xyz", "1" * 65])
def test_an_invalid_namespace_removes_nothing(stores: Stores, prefix: str) -> None:
    """An empty prefix would select all namespaces: a script's unset variable must not clear a store."""
    result = invoke("purge", stores.root("a"), "--namespace", prefix, "--yes")
    assert result.exit_code == 2 and "hexadecimal digits" in result.stderr
    assert stores.found("a", NEW, KEYS) == 4


def test_verify_checks_every_part(stores: Stores) -> None:
    stores.fill("b", NEW, KEYS)
    stores.damage("b", KEYS[2])
    path = stores.levels("a", "b")
    result = invoke("verify", path)
    assert result.exit_code == 1
    (damaged,) = stores.root("b").rglob(KEYS[2].hex())
    assert result.stdout.splitlines() == [
        "a:", "checked 10 pages, 40.0 KiB: none damaged",
        "b:", "checked 4 pages, 16.0 KiB: 1 damaged", "  tag: 1", f"  {damaged}: tag",
    ]
    assert invoke("verify", path, "--part", "a").exit_code == 0


def test_listing_and_dry_runs_change_nothing(stores: Stores) -> None:
    before = {str(path): path.lstat().st_mtime_ns for path in stores.root("a").rglob("*")}
    for command in ("ls", "ls --pages", "stat --chains", "purge --dry-run --yes", "trim --to 0 --dry-run"):
        name, *options = command.split()
        assert invoke(name, stores.root("a"), *options).exit_code == 0
    assert {str(path): path.lstat().st_mtime_ns for path in stores.root("a").rglob("*")} == before


def test_the_text_names_some_damaged_pages_and_json_all(stores: Stores) -> None:
    many = make_keys(30)
    stores.fill("b", NEW, many)
    for key in many[:25]:
        stores.damage("b", key)
    lines = invoke("verify", stores.root("b")).stdout.splitlines()
    assert (len(lines), lines[1], lines[-1]) == (23, "  tag: 25", "  and 5 more; --json names them")
    result = invoke("verify", stores.root("b"), "--json")
    (part,) = json.loads(result.stdout)["parts"]
    assert (result.exit_code, part["pages"], part["damaged"]) == (1, 30, {"tag": 25})
    found = part["damaged_pages"]
    assert {one["key"] for one in found} == {key.hex() for key in many[:25]}
    assert all(one["namespace"] == NEW.hex() and Path(one["path"]).is_file() for one in found)


def test_copies_and_removals_are_reported_as_json(stores: Stores) -> None:
    stores.open("b").backend.close()
    (copied,) = as_json("copy", stores.root("a"), stores.root("b"))
    assert (copied["copied"], copied["damaged"], copied["bytes"]) == (10, 0, 10 * PAGE)
    (dry,) = as_json("purge", stores.root("b"), "--namespace", "12", "--dry-run")
    (trimmed,) = as_json("trim", stores.root("b"), "--to", f"{7 * PAGE}B", "--yes")
    (purged,) = as_json("purge", stores.root("b"), "--yes")
    assert (dry["pages"], trimmed["pages"], trimmed["left_bytes"], purged["pages"]) == (4, 3, 7 * PAGE, 7)
    path = next(stores.root("a").rglob(KEYS[0].hex()))
    inspected = json.loads(invoke("inspect", path, "--json").stdout)
    assert (inspected["proved"], inspected["header"]["key"]) == (True, KEYS[0].hex())


@pytest.mark.parametrize("command", ["ls", "stat", "verify"])
def test_without_a_store_the_configuration_in_the_environment_is_used(
    stores: Stores, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "pass a STORE" in invoke(command).stderr
    path = stores.configured(type="file", options={"path": str(stores.root("a"))})
    path = path.rename(stores.folder / "hicache.conf")
    monkeypatch.setenv("HICACHE_CONFIG_FILE", str(path))
    (part,) = as_json(command)
    assert part.get("pages", 10) == 10
    assert "Missing argument" in invoke("purge", "--yes").stderr  # a command that removes pages needs an explicit store


@pytest.mark.parametrize("args", [["ls"], ["ls", "--pages"], ["stat", "--chains"]])
def test_at_60_columns_no_number_is_wrapped(
    stores: Stores, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = [line for line in invoke(args[0], stores.root("a"), *args[1:]).stdout.splitlines() if "payload" not in line]
    assert max(map(len, lines)) <= 60

"""A root that is moved or replaced while engines use it: they write and remove files only in their own directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.testing import HIT, SET_ERROR, STORED, load, make_keys, soon, store_chain

from ._files import PAGE, check, open_file


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return all paths below a directory with the bytes of files, None for directories."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("instead", ["nothing", "an empty directory", "another store", "a link", "a file"])
def test_a_store_with_a_moved_root_changes_nothing_until_it_is_back(
    tmp_path: Path, instead: str
) -> None:
    root, away, foreign = tmp_path / "s", tmp_path / "away", tmp_path / "foreign"
    store, other = open_file(root, capacity=8 * PAGE), open_file(foreign)
    keys = make_keys(5, "ours")
    store_chain(store, keys)
    store_chain(other, make_keys(5, "theirs"))
    other.backend.close()
    usage = store.backend.usage()
    root.rename(away)
    if instead == "an empty directory":
        root.mkdir(mode=0o700)
    elif instead == "another store":
        foreign.rename(root)
    elif instead == "a link":
        root.symlink_to(foreign)
    elif instead == "a file":
        root.write_bytes(b"mine")
    before, ours = contents(tmp_path), contents(away)
    assert store_chain(store, make_keys(5, "new")) == [SET_ERROR] * 5
    assert store.backend.delete(keys, deadline=soon()) == 0
    assert (store.backend.usage(), store.backend.statistics().errors) == (usage, {"ESTALE": 7})
    assert load(store, keys) == [HIT] * 5, "the opened directory can no longer be read"
    assert contents(tmp_path) == before and contents(away) == ours
    if instead != "nothing":
        root.rename(foreign if instead == "another store" else tmp_path / "replaced")
    away.rename(root)
    assert store_chain(store, make_keys(5, "new")) == [STORED] * 5
    check(store, root)
    store.backend.close()


def test_closing_a_moved_store_does_not_change_the_directory_at_its_path(tmp_path: Path) -> None:
    root, away = tmp_path / "s", tmp_path / "away"
    store = open_file(root)
    store_chain(store, make_keys(3))
    root.rename(away)
    other = open_file(root)
    before = contents(root)
    store.backend.close()
    assert contents(root) == before
    assert [path.name for path in (away / "tmp").iterdir()] == []
    check(other, root)
    other.backend.close()

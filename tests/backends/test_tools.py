"""The operator's tools: survey, verify, copy, purge and trim."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from hicache.backends.base import StoredPage
from hicache.backends.file.inspection import make_store
from hicache.backends.stored import StoredPages
from hicache.backends.tools.copying import copy_stored
from hicache.backends.tools.removal import purge_stored, trim_stored
from hicache.backends.tools.survey import survey
from hicache.backends.tools.verify import NO_KEYS, PageKeys, verify_stored
from hicache.errors import InvalidInput
from hicache.frame import FrameCodec
from hicache_lab.conformance import NAMESPACE, PAYLOAD_BYTES, by_key, make_keys, sealed
from tests.backends import _files
from tests.backends._files import open_stored
from tests.seeds import rng, seeds

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
MAC_KEY = bytes(range(32))
PAGE = CODEC.frame_bytes
Step = TypeVar("Step")


@dataclass(slots=True)
class Raws:
    """The pages of stores in a folder, by name."""

    folder: Path
    opened: list[StoredPages]

    def __call__(self, name: str, capacity_pages: int | None = None) -> StoredPages:
        make_store(self.folder / name)
        raw = open_stored(path=self.folder / name, capacity=capacity_pages and capacity_pages * PAGE)
        self.opened.append(raw)
        return raw


@pytest.fixture
def raws(tmp_path: Path) -> Iterator[Raws]:
    raws = Raws(tmp_path, [])
    yield raws
    for raw in raws.opened:
        raw.close()


def fill(raw: StoredPages, keys: list[bytes], *, used_s: float, codec: FrameCodec = CODEC) -> None:
    """Store a chain."""
    for key, data, parent in zip(keys, sealed(codec, keys), [None, *keys[:-1]], strict=True):
        assert raw.write(StoredPage(codec.namespace, key, len(data), used_s), data, parent)


def last(steps: Iterator[Step]) -> Step:
    *_, final = steps
    return final


def test_a_survey_reads_few_headers_but_all_with_chains(raws: Raws) -> None:
    raw, keys = raws("a"), make_keys(20)
    fill(raw, keys, used_s=time.time())
    found = last(survey(raw)).namespaces[NAMESPACE]
    assert (found.pages, found.bytes, found.tags.total()) == (20, 20 * PAGE, 8)
    full = last(survey(raw, with_chains=True))
    assert full.chains is not None and (len(full.chains), full.chains.heads()) == (20, 1)
    assert full.namespaces[NAMESPACE].tags == {"XXH3_128": 20}


def test_a_keyed_page_is_proved_by_its_key_and_kept_without_it(raws: Raws) -> None:
    raw, keys = raws("a"), make_keys(2)
    fill(raw, keys, used_s=time.time(), codec=FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[MAC_KEY]))
    right, wrong, none = PageKeys(mac=(MAC_KEY,)), PageKeys(mac=(bytes(32),)), NO_KEYS
    found = [last(verify_stored(raw, keys=given, remove=True)) for given in (right, wrong, none)]
    assert [(one.damaged, one.unsupported, one.unverifiable, one.removed) for one in found] == [
        ({}, {}, 0, 0), ({}, {"mac_key": 2}, 0, 0), ({}, {}, 2, 0),
    ]


@pytest.mark.parametrize(("sound", "damaged", "removed"), [(16, 16, 16), (15, 16, 0), (0, 15, 15)])
def test_a_scrub_that_finds_most_pages_damaged_removes_none(
    raws: Raws, sound: int, damaged: int, removed: int
) -> None:
    """Fewer than stop a reader are removed in any case."""
    raw, keys = raws("a"), make_keys(sound + damaged)
    fill(raw, keys, used_s=time.time())
    for key in keys[:damaged]:
        _files.page_path(raws.folder / "a", CODEC, key).write_bytes(b"x" * PAGE)
    found = last(verify_stored(raw, keys=NO_KEYS, remove=True))
    assert (sum(found.damaged.values()), found.removed, found.spared) == (damaged, removed, damaged - removed)
    assert len(list(raw.pages())) == sound + damaged - removed


@pytest.mark.parametrize(
    "wrong",
    [
        lambda raw: purge_stored(raw, namespace="*"),  # Redis would take this pattern for all pages
        lambda raw: trim_stored(raw, -1),
        lambda raw: purge_stored(raw, older_than_s=-1.0),
        lambda raw: verify_stored(raw, keys=NO_KEYS, rate_bytes_per_s=0),
        lambda raw: copy_stored(raw, raw, keys=NO_KEYS, namespace="?"),
    ],
)
def test_invalid_arguments_are_rejected_before_any_change(
    raws: Raws, wrong: Callable[[StoredPages], Iterator[object]]
) -> None:
    raw = raws("a")
    fill(raw, make_keys(2), used_s=time.time())
    with pytest.raises(InvalidInput):
        last(wrong(raw))
    assert len(list(raw.pages())) == 2


@pytest.mark.parametrize("seed", seeds(10))
def test_a_copy_stopped_anywhere_leaves_whole_prefixes_and_can_continue(raws: Raws, seed: int) -> None:
    dice, source, target = rng(seed), raws("a"), raws("b")
    chains = [make_keys(dice.randrange(1, 8), f"chain {number}") for number in range(5)]
    for keys in chains:
        fill(source, keys, used_s=time.time() - dice.random() * 1000)
    steps = copy_stored(source, target, keys=NO_KEYS)
    for _ in range(dice.randrange(sum(map(len, chains)) * 2)):
        if next(steps, None) is None:
            break
    there = set(by_key(target.pages()))
    for keys in chains:
        length = sum(key in there for key in keys)
        assert set(keys[:length]) <= there
    done = last(copy_stored(source, target, keys=NO_KEYS))
    assert (done.is_whole, done.present, done.copied + done.present) == (True, len(there), sum(map(len, chains)))
    assert {k: target.read(p, PAGE) for k, p in by_key(target.pages()).items()} == {
        k: source.read(p, PAGE) for k, p in by_key(source.pages()).items()
    }


def test_in_the_order_of_the_listing_a_stopped_copy_would_have_holes(raws: Raws) -> None:
    """The control of the test above: the listing alone does not put heads first."""
    source = raws("a")
    keys = make_keys(12)
    fill(source, keys, used_s=time.time())
    listed = [page.key for page in source.pages()]
    assert any(set(listed[:length]) != set(keys[:length]) for length in range(1, 12))


def test_a_copy_into_a_full_store_counts_rejected_pages_and_their_descendants(raws: Raws) -> None:
    source, target = raws("a"), raws("b", capacity_pages=3)
    fill(source, make_keys(6), used_s=time.time())
    done = last(copy_stored(source, target, keys=NO_KEYS))
    assert (done.copied, done.refused, done.behind, done.is_whole) == (3, 1, 2, False)


@pytest.mark.parametrize("pages_left", [0, 1, 5, 9, 10, 100])
def test_a_trim_leaves_at_most_the_size_and_whole_prefixes(raws: Raws, pages_left: int) -> None:
    raw, now_s = raws("a"), time.time()
    old, new = make_keys(5, "old"), make_keys(5, "new")
    fill(raw, old, used_s=now_s - 100)
    fill(raw, new, used_s=now_s)
    done = last(trim_stored(raw, pages_left * PAGE + PAGE // 2))
    there = set(by_key(raw.pages()))
    assert len(there) * PAGE == done.left_bytes == min(10, pages_left) * PAGE
    kept_old, kept_new = sum(key in there for key in old), sum(key in there for key in new)
    assert there == set(old[:kept_old]) | set(new[:kept_new])
    assert kept_new == min(5, pages_left)

"""The identities of pages, with and without the native helper."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from hicache import ghosts
from hicache.ghosts import Departure, GhostIndex, Reason, key_ids, last_page_id, page_ids
from tests.seeds import rng, seeds


@pytest.mark.parametrize("seed", seeds(4))
def test_the_helper_and_the_package_give_the_same_identities(
    native: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random = rng(seed)
    for _ in range(300):
        page_bytes = random.choice([1, 4, 8, 12, 31, 32, 33, 64, 100, 256])
        run, prior = random.randbytes(page_bytes * random.randrange(6)), random.getrandbits(64)
        monkeypatch.setattr(ghosts, "native_page_ids", native.page_ids)
        found = page_ids(prior, memoryview(run), page_bytes)
        monkeypatch.setattr(ghosts, "native_page_ids", None)
        assert found == page_ids(prior, run, page_bytes) and len(found) == len(run) // page_bytes
        for helper in (native.last_page_id, None):
            monkeypatch.setattr(ghosts, "native_last_page_id", helper)
            assert last_page_id(prior, memoryview(run), page_bytes) == [prior, *found][-1]


def test_an_identity_depends_on_all_pages_before_it() -> None:
    first, same, other = page_ids(0, b"aabbcc", 2), page_ids(0, b"aabb", 2), page_ids(0, b"abbbcc", 2)
    assert first[:2] == same and not set(first) & set(other)
    assert page_ids(first[0], b"bbcc", 2) == first[1:]


def test_the_helper_rejects_pages_without_bytes(native: Any) -> None:
    with pytest.raises(ValueError, match="page_bytes must be positive"):
        native.page_ids(0, b"abc", 0)
    with pytest.raises(ValueError, match="page_bytes must be positive"):
        native.last_page_id(0, b"abc", 0)


def test_the_collector_does_not_visit_departed_pages(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for helper in (native.untrack, id):
        monkeypatch.setattr(ghosts, "untrack", helper)
        index, departure = GhostIndex(80), Departure(Reason.EVICTED, "host", 1.0)
        for start in range(0, 200, 5):
            index.note(range(start, start + 5), departure)
        gc.collect()
        assert any(map(gc.is_tracked, (departure, *index._generations))) == (helper is id)


def test_the_identity_of_a_page_key_is_its_first_eight_bytes() -> None:
    keys = bytes(range(64))
    assert key_ids(keys) == [int.from_bytes(keys[:8], "little"), int.from_bytes(keys[32:40], "little")]

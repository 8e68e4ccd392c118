"""Pages that form a cycle: any process that may write a store without keys can forge them.

No store that evicts by chains takes them from an engine, and no store or tool waits for them or keeps them longer.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hicache.backends.base import SetOutcome, StoredPage
from hicache.backends.compose import Levels, Shards
from hicache.backends.compose.sharded import ShardCodec
from hicache.backends.file.inspection import make_store
from hicache.backends.memory import MemoryDriver
from hicache.backends.stored import StoredPages
from hicache.backends.tools.copying import copy_stored
from hicache.backends.tools.removal import trim_stored
from hicache.backends.tools.survey import survey
from hicache.backends.tools.verify import NO_KEYS
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    NAMESPACE,
    PRESENT,
    STORED,
    Subject,
    bare,
    exists,
    forged,
    load,
    make_keys,
    memory_store,
    memory_subject,
    soon,
    store_chain,
)
from tests.backends._subjects import doorless
from tests.waiting import wait_for

from ._files import CODEC, PAGE, open_file, open_stored
from ._troubled import Troubled
from .compose._parts import COPIES, named, settle
from .test_limit import limited_file

SELVES = make_keys(8, "self")
CYCLE = make_keys(2, "cycle")
FORGED = {
    **{key: forged(CODEC, key, key) for key in SELVES},
    CYCLE[0]: forged(CODEC, CYCLE[0], CYCLE[1]),
    CYCLE[1]: forged(CODEC, CYCLE[1], CYCLE[0]),
}
CAPACITY_PAGES = 6


def levels_over_forged(local: Subject) -> tuple[Subject, Levels]:
    """Return a local level over a level that any process can write, with forged pages in it."""
    below = MemoryDriver()
    for key, data in FORGED.items():
        below.poke(CODEC.namespace, key, data)
    backend = Levels(CODEC, named(local.backend, bare(below, CODEC)), cascade_bytes_max=COPIES)
    return Subject(backend, local.read, local.write), backend


def memory(capacity_pages: int | None = None) -> Subject:
    return subject_of(MemoryDriver(None if capacity_pages is None else capacity_pages * PAGE))


def subject_of(driver: MemoryDriver) -> Subject:
    return memory_subject(bare(driver, CODEC), driver)


def takes_new_pages(store: Subject) -> bool:
    """True if the store evicts all of its pages for new chains."""
    return all(store_chain(store, make_keys(CAPACITY_PAGES, f"new {number}")) == [STORED] * 6 for number in range(3))


@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_reading_forged_pages_does_not_block_the_local_level(tmp_path: Path, kind: str, together: bool) -> None:
    capacity_bytes = CAPACITY_PAGES * PAGE
    local = memory(CAPACITY_PAGES) if kind == "memory" else open_file(tmp_path / "s", capacity=capacity_bytes)
    store, backend = levels_over_forged(local)
    assert load(store, SELVES) == [CORRUPT] * 8
    for batch in [CYCLE] if together else [[key] for key in CYCLE]:
        assert load(store, batch) == [HIT] * len(batch), "forged pages have the correct payloads"
        settle(backend)
    assert exists(local, CYCLE) == 2
    assert exists(local, SELVES) == 0
    assert takes_new_pages(local)
    assert exists(local, CYCLE) == 0
    backend.close()


@pytest.mark.parametrize("first", [0, 1])
def test_a_header_that_contradicts_the_order_of_a_batch_is_not_trusted(first: int) -> None:
    local, keys = Troubled(), CYCLE[first:] + CYCLE[:first]
    store, backend = levels_over_forged(subject_of(local))
    assert load(store, keys) == [HIT] * 2
    settle(backend)
    assert [call for call in local.calls if call[0] == "set"] == [("set", tuple(keys), None)]
    backend.close()


def test_the_first_pages_header_gives_the_parent_if_the_batch_does_not() -> None:
    local, (key, _) = Troubled(), CYCLE
    store, backend = levels_over_forged(subject_of(local))
    assert load(store, [key]) == [HIT]
    settle(backend)
    assert [call for call in local.calls if call[0] == "set"] == [("set", (key,), CYCLE[1])]
    backend.close()


def test_a_share_of_a_batch_does_not_follow_one_of_its_own_pages() -> None:
    """The second batch contradicts the first one, from which the set remembers the last page of each part."""
    codec = ShardCodec(CODEC)
    parts = [memory_store(codec) for _ in range(2)]
    backend = Shards(codec, named(*parts))
    store, keys = doorless(backend), make_keys(6)
    assert store_chain(store, keys) == [STORED] * 6
    assert store_chain(store, keys[:5], parent=keys[5]) == [PRESENT] * 5
    assert backend.delete(keys, deadline=soon()) == 6
    assert store_chain(store, keys[:5], parent=keys[5]) == [STORED] * 5
    assert backend.statistics().errors == {}
    backend.close()


def write_forged(raw: StoredPages, used_s: float = 1.0) -> None:
    for key, data in FORGED.items():
        assert raw.write(StoredPage(NAMESPACE, key, PAGE, used_s), data, None)


def _is_stored(store: Subject, keys: list[bytes]) -> bool:
    return set(store_chain(store, keys)) == {PRESENT}


def test_a_limit_evicts_forged_pages_like_others(root: Path) -> None:
    make_store(root)
    raw = open_stored(path=root)
    write_forged(raw)
    raw.close()
    store = limited_file(root, capacity_bytes=20 * PAGE)
    chains = [make_keys(6, f"chain {number}") for number in range(4)]
    for keys in chains:
        wait_for(partial(_is_stored, store, keys))
    assert exists(store, CYCLE[:1]) == exists(store, CYCLE[1:]) == 0, "the oldest pages were not evicted"
    assert exists(store, chains[-1]) == 6


def test_a_limit_stores_a_batch_with_a_repeated_key_in_parts(tmp_path: Path) -> None:
    clock, (one, two, three) = ManualClock(), make_keys(3)  # it stands still, so no sweep makes room
    store = limited_file(tmp_path / "s", capacity_bytes=2 * PAGE, clock=clock)
    assert store_chain(store, [one, two, one, three]) == [STORED, STORED, PRESENT, SetOutcome.REJECTED]


def test_tools_end_despite_forged_pages(tmp_path: Path) -> None:
    raws: list[StoredPages] = []
    for name in ("from", "to"):
        make_store(tmp_path / name)
        raws.append(open_stored(path=tmp_path / name))
    source, target = raws
    write_forged(source)
    found = [*survey(source, with_chains=True)][-1]
    assert (found.pages, found.chains and len(found.chains)) == (10, 10)
    copied = [*copy_stored(source, target, keys=NO_KEYS)][-1]
    assert (copied.seen, copied.damaged, copied.behind, copied.copied) == (10, 8, 2, 0)
    trimmed = [*trim_stored(source, PAGE)][-1]
    assert (trimmed.pages, trimmed.left_bytes) == (9, PAGE)
    for raw in raws:
        raw.close()

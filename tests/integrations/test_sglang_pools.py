"""HiCache's store for SGLang's models with several host pools, tested without SGLang: the contract of interface v2."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.backends.base import Direction
from hicache.errors import ConfigError, InvalidInput
from hicache.frame import NO_PARENT, FrameHeader
from hicache.integrations.sglang.hits import ALL_PAGES, TRAILING_PAGES
from hicache.integrations.sglang.pages import HostPages
from hicache.integrations.sglang.storage import HostPoolStorage
from hicache_lab.clocks import ManualClock
from hicache_lab.faults import spoiled
from tests.integrations.host_pools import ENGINE, HostPool, Ranks, StatePool, files, keys, open_storage
from tests.seeds import seeds
from tests.waiting import wait_for

MEMORY = {"type": "memory", "options": {"capacity": 64 << 20}}
Open = Callable[..., HostPoolStorage]


@dataclass
class Transfer:
    """The used fields of SGLang's PoolTransfer."""

    name: str
    keys: Sequence[str] | None = None
    host_indices: torch.Tensor | None = None
    hit_policy: str = ALL_PAGES


def asked(name: str, count: int = 1, policy: str = TRAILING_PAGES) -> Transfer:
    """Return a transfer as SGLang passes it to a lookup."""
    return Transfer(name, ["__placeholder__"] * count, hit_policy=policy)


def hybrid() -> dict[str, Any]:
    """Return the pools of a model with full attention, a sliding window, states and an indexer."""
    return {
        "kv": HostPool("page_first"), "swa": HostPool("layer_first"), "mamba": StatePool(),
        "indexer": HostPool("page_first", is_mla=True),
    }


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Open the storage of an engine with several pools, as HiCacheStore does."""
    made: list[HostPoolStorage] = []

    def open_store(pools: dict[str, Any], storage: dict[str, Any] | None = None, **options: Any) -> HostPoolStorage:
        made.append(open_storage(pools, storage or files(tmp_path), **options))
        return made[-1]

    yield open_store
    for one in made:
        one.close()


def store_all(store: HostPoolStorage, pools: dict[str, Any], wanted: Sequence[str], names: Sequence[str]) -> None:
    """Store the pages `wanted` of the pools `names`, from the first pages of the pools."""
    for name in names:
        one = Transfer(name, wanted, pools[name].indices(*range(len(wanted))), TRAILING_PAGES)
        assert store.write_pools([one], None) == {name: [True] * len(wanted)}


def damage(folder: Path, key: str, payload_bytes: int) -> None:
    """Flip a bit in the stored page of a key whose payload has this size."""
    found = [path for path in (folder / "pages").rglob(key) if path.stat().st_size > payload_bytes]
    (file,) = [path for path in found if _header(path).payload_bytes == payload_bytes]
    data = bytearray(file.read_bytes())
    data[256 + 3] ^= 1
    file.write_bytes(data)


def _header(file: Path) -> FrameHeader:
    header = FrameHeader.parse(file.read_bytes())
    assert header is not None
    return header


# Pages of several pools in one call


def test_pages_of_each_pool_are_read_by_another_engine(opened: Open) -> None:
    first, second = hybrid(), hybrid()
    for seed, pool in enumerate(first.values()):
        pool.fill(seed)
    wanted = keys(4)
    moved = {"kv": (wanted, (3, 1, 7, 2)), "swa": (wanted[2:], (9, 4)), "mamba": (wanted[3:], (11,))}
    moved["indexer"] = moved["kv"]
    store = opened(first)
    found = store.write_pools([Transfer(n, k, first[n].indices(*at)) for n, (k, at) in moved.items()], None)
    assert found == {name: [True] * len(chain) for name, (chain, _) in moved.items()}
    store = opened(second)
    found = store.read_pools([Transfer(n, k, second[n].indices(*range(len(k)))) for n, (k, _) in moved.items()])
    assert found == {name: [True] * len(chain) for name, (chain, _) in moved.items()}
    for name, (chain, places) in moved.items():
        for target, source in enumerate(places):
            assert torch.equal(second[name].page(target), first[name].page(source))
        assert not any(second[name].page(other).any() for other in range(len(chain), 16))
    assert store.clear() == 4 + 2 + 1 + 4
    assert store.read_pools([Transfer("mamba", wanted[3:], second["mamba"].indices(0))]) == {"mamba": [False]}


def test_pools_with_equal_pages_do_not_share_them(opened: Open) -> None:
    """SGLang stages a draft's pages through the pool of full attention."""
    pool = HostPool("page_first")
    store = opened({"kv": pool, "swa": pool, "draft": pool})
    store_all(store, {"draft": pool}, keys(2), ["draft"])
    assert store.lookup(keys(2)) == 0
    assert store.read_pools([Transfer("swa", keys(2), pool.indices(4, 5))]) == {"swa": [False, False]}
    assert store.read_pools([Transfer("draft", keys(2), pool.indices(4, 5))]) == {"draft": [True, True]}


def test_an_engine_that_differs_finds_no_pages_of_a_pool(opened: Open) -> None:
    tagged = HostPool("page_first")
    tagged.storage_format_tag = "token-major"  # type: ignore[attr-defined]
    pools: dict[str, Any] = {"kv": HostPool("page_first"), "swa": HostPool("page_first"), "mamba": StatePool()}
    store_all(opened(pools), pools, keys(1), ["swa", "mamba"])

    def finds(name: str, **changed: Any) -> bool:
        engine = changed.pop("engine", ENGINE)
        store = opened({**pools, **changed}, engine=engine)
        return store.read_pools([Transfer(name, keys(1), pools[name].indices(1))])[name] == [True]

    assert finds("swa") and finds("mamba")
    assert not finds("swa", swa=HostPool("page_first_direct"))
    assert not finds("swa", swa=tagged)
    assert not finds("mamba", mamba=StatePool(dtype=torch.int32))  # of the same size
    assert not finds("mamba", engine=replace(ENGINE, weights="others"))


def test_ranks_of_mla_share_all_pools_but_states_and_heads_of_their_own(opened: Open) -> None:
    heads = HostPool("page_first")
    heads.head_num = 2  # type: ignore[attr-defined]
    mla, indexer = HostPool("page_first", is_mla=True), HostPool("page_first", is_mla=True)
    pools: dict[str, Any] = {"kv": mla, "indexer": indexer, "mamba": StatePool(), "draft": heads}
    store_all(opened(pools, ranks=Ranks(0, 2, is_mla_model=True)), pools, keys(1), list(pools))
    other = opened(pools, ranks=Ranks(1, 2, is_mla_model=True))
    found = other.read_pools([Transfer(name, keys(1), pool.indices(1)) for name, pool in pools.items()])
    assert found == {"kv": [True], "indexer": [True], "mamba": [False], "draft": [False]}


def test_windows_and_states_begin_a_chain_and_other_pages_follow_their_prefix(opened: Open, tmp_path: Path) -> None:
    """A parent that is not stored would make operators look for lost pages."""
    pools = hybrid()
    store, wanted = opened(pools), keys(3)
    for name, policy in (("indexer", ALL_PAGES), ("mamba", TRAILING_PAGES)):
        store.write_pools([Transfer(name, wanted[2:], pools[name].indices(0), policy)], wanted[:2])
    headers = [_header(path) for path in (tmp_path / "pages").rglob(wanted[2])]
    assert {header.parent_key for header in headers} == {NO_PARENT, bytes.fromhex(wanted[1])}


# Hits


def oracle(pages: int, kv: set[int], pools: Sequence[tuple[str, int, set[int]]]) -> list[int]:
    """Return the lengths of the prefixes that can be restored, by the words of SGLang's policies."""
    rules = [("kv", pages, kv), *pools]

    def needed(length: int, policy: str, count: int) -> set[int]:
        return set(range(max(0, length - count) if policy == TRAILING_PAGES else 0, length))

    return [
        length
        for length in range(1, pages + 1)
        if all(needed(length, policy, count) <= stored for policy, count, stored in rules)
    ]


def write_case(
    store: HostPoolStorage, pools: dict[str, Any], chain: Sequence[str], stored: dict[str, set[int]]
) -> None:
    for name, places in stored.items():
        if places:
            store_all(store, pools, [chain[place] for place in sorted(places)], [name])


def test_the_hits_of_one_pool_are_those_of_its_policy(opened: Open) -> None:
    """All subsets of four pages, with all policies and windows."""
    pools = {"kv": HostPool("page_first"), "swa": HostPool("page_first")}
    store = opened(pools, MEMORY)
    for number, places in enumerate(itertools.product((False, True), repeat=4)):
        stored = {place for place, is_stored in enumerate(places) if is_stored}
        for kv_pages in range(5):
            chain = keys(4, f"{number}-{kv_pages}-")
            write_case(store, pools, chain, {"kv": set(range(kv_pages)), "swa": stored})
            for policy, count in ((ALL_PAGES, 2), *((TRAILING_PAGES, count) for count in (1, 2, 3, 5))):
                found = store.find(chain, [asked("swa", count, policy)])
                allowed = oracle(4, set(range(kv_pages)), [(policy, count, stored)])
                assert list(found.lengths) == allowed
                assert found.pages == max(allowed, default=0)
                assert found.pools == {
                    name: pages for name, pages in (("kv", kv_pages), ("swa", found.pages)) if pages
                }


@pytest.mark.parametrize("seed", seeds(3))
def test_the_hits_of_several_pools_are_those_that_all_policies_allow(opened: Open, seed: int) -> None:
    pools, rng = hybrid(), random.Random(seed)
    store = opened(pools, MEMORY)
    for number in range(40):
        chain = keys(8, f"{number}-")
        stored = {name: {page for page in range(8) if rng.random() < 0.8} for name in ("swa", "mamba", "indexer")}
        stored["kv"] = set(range(rng.randrange(9)))
        write_case(store, pools, chain, stored)
        rules = [("indexer", ALL_PAGES, 8), ("swa", TRAILING_PAGES, rng.randrange(1, 5)), ("mamba", TRAILING_PAGES, 1)]
        rng.shuffle(rules)
        found = store.find(chain, [asked(name, count, policy) for name, policy, count in rules])
        allowed = oracle(8, stored["kv"], [(policy, count, stored[name]) for name, policy, count in rules])
        assert list(found.lengths) == allowed
        assert all(found.pages <= pages for pages in found.pools.values())


def test_a_damaged_page_shortens_the_hit_by_the_rule_of_its_pool(opened: Open, tmp_path: Path) -> None:
    pools, chain = hybrid(), keys(6)
    for seed, pool in enumerate(pools.values()):
        pool.fill(seed)
    store = opened(pools)
    store_all(store, pools, chain, ["kv", "swa", "indexer"])
    write_case(store, pools, chain, {"mamba": {1, 3, 5}})
    transfers = [asked("swa", 2), asked("mamba"), asked("indexer", 6, ALL_PAGES)]
    assert list(store.find(chain, transfers).lengths) == [2, 4, 6]

    def read(name: str, places: Sequence[int]) -> list[bool]:
        wanted = [chain[place] for place in places]
        return store.read_pools([Transfer(name, wanted, pools[name].indices(*range(8, 8 + len(places))))])[name]

    sizes = {name: HostPages(pool).shape.payload_bytes for name, pool in pools.items()}
    assert len({sizes["mamba"], sizes["indexer"], sizes["swa"]}) == 3
    damage(tmp_path, chain[5], sizes["mamba"])
    assert read("mamba", [5]) == [False]
    assert list(store.find(chain, transfers).lengths) == [2, 4]
    damage(tmp_path, chain[3], sizes["indexer"])
    assert read("indexer", [2, 3, 4]) == [True, False, True]
    assert list(store.find(chain, transfers).lengths) == [2]
    assert store.find(chain, transfers).pools["indexer"] == 3
    assert store.lookup(chain) == 6


def test_a_model_without_kv_of_its_own_hits_what_its_other_pools_have(opened: Open) -> None:
    pools = {"swa": HostPool("page_first"), "deepseek_v4_c4": HostPool("page_first")}
    store, chain = opened(pools, MEMORY), keys(4)
    write_case(store, pools, chain, {"deepseek_v4_c4": {0, 1, 2}, "swa": {1, 2, 3}})
    transfers = [asked("deepseek_v4_c4", 4, ALL_PAGES), asked("swa", 2)]
    assert list(store.find(chain, transfers).lengths) == [3]
    assert store.find(chain, transfers[1:]).pages == 0  # a window alone
    nothing = torch.empty(0, dtype=torch.int64)
    assert store.lookup(chain) == 0
    assert store.read(chain, nothing) == store.write(chain, nothing, []) == [True] * 4


# Limits


def test_storage_is_not_used_for_any_pool_after_a_possible_change_of_weights(opened: Open) -> None:
    current = True
    pools = hybrid()
    store, chain = opened(pools, is_current=lambda: current), keys(1)
    store_all(store, pools, chain, list(pools))
    transfers = [Transfer(name, chain, pool.indices(0)) for name, pool in pools.items()]
    assert store.find(chain, [asked("mamba")]).pages == 1
    current = False
    assert store.find(chain, [asked("mamba")]).pages == 0
    assert store.read_pools(transfers) == store.write_pools(transfers, None) == {name: [False] for name in pools}


def test_pools_of_one_call_share_its_deadline(opened: Open, tmp_path: Path) -> None:
    """The control: in calls of their own, both pools have the time that they need."""
    pools, clock = hybrid(), ManualClock()
    store_all(opened(pools), pools, keys(1), ["swa", "mamba"])
    slow = opened(pools, spoiled(files(tmp_path), latency=0.7), clock=clock, transfer={"storage_deadline": 1})

    def pass_time() -> None:
        if clock.sleepers:  # the store is slow; the test is not
            clock.advance(0.05)

    def read(*names: str) -> dict[str, list[bool]]:
        with ThreadPoolExecutor(1) as threads:
            transfers = [Transfer(name, keys(1), pools[name].indices(0)) for name in names]
            call = threads.submit(slow.read_pools, transfers)
            wait_for(call.done, pass_time)
            return call.result()

    assert {**read("swa"), **read("mamba")} == {"swa": [True], "mamba": [True]}
    assert read("swa", "mamba") == {"swa": [True], "mamba": [False]}
    clock.advance(3600)


def test_a_failure_of_one_pool_pauses_all(opened: Open, tmp_path: Path) -> None:
    pools, clock = hybrid(), ManualClock()
    slow = spoiled(files(tmp_path), latency=3600)
    store = opened(pools, slow, clock=clock, transfer={"storage_deadline": 1})
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(store.read_pools, [Transfer(n, keys(1), p.indices(0)) for n, p in pools.items()])
        wait_for(lambda: clock.sleepers > 0)
        clock.advance(1)  # a second call that waits for the store would not end
        wait_for(call.done)
        assert call.result() == {name: [False] for name in pools}
    assert store._storage.statistics().skipped[Direction.READ] == 3
    assert store.read(keys(1), pools["kv"].indices(0)) == [False]  # is skipped too
    assert store._storage.statistics().skipped[Direction.READ] == 4
    clock.advance(3600)


def test_a_wrong_index_of_one_pool_moves_nothing(opened: Open) -> None:
    pools = hybrid()
    store = opened(pools)
    pools["kv"].fill()
    store_all(store, pools, keys(1), ["kv"])
    for wrong in (pools["mamba"].indices(16), pools["mamba"].indices(-1), pools["mamba"].indices(1, 2), None):
        transfers = [Transfer("kv", keys(1), pools["kv"].indices(5)), Transfer("mamba", keys(1), wrong)]
        pools["kv"].kv_buffer.zero_()
        with pytest.raises(InvalidInput):
            store.read_pools(transfers)
        assert not pools["kv"].page(5).any()
        with pytest.raises(InvalidInput):
            store.write_pools([replace(transfers[0], keys=keys(1, "b")), transfers[1]], None)
        assert store.lookup(keys(1, "b")) == 0
    assert store.read_pools([Transfer("kv", keys(1), pools["kv"].indices(5))]) == {"kv": [True]}


def test_unknown_pools_and_policies_are_errors(opened: Open) -> None:
    pools = hybrid()
    store = opened(pools)
    store_all(store, pools, keys(1), ["kv"])
    with pytest.raises(InvalidInput, match="'draft' was not registered"):
        store.find(keys(1), [asked("draft")])
    with pytest.raises(InvalidInput, match="hit policy 'some_pages'"):
        store.find(keys(1), [asked("swa", 1, "some_pages")])
    with pytest.raises(InvalidInput, match="'swa' has a store already"):
        store.add("swa", HostPages(pools["swa"]), ENGINE.namespace(Ranks(), pools["swa"], HostPages(pools["swa"])))


def test_a_pool_that_does_not_describe_its_pages_is_refused() -> None:
    class Undescribed(StatePool):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            raise NotImplementedError("side states are not part of it")

    with pytest.raises(ConfigError, match=r"side states .* --hicache-mem-layout page_first"):
        HostPages(Undescribed())


def test_sglangs_metrics_have_the_transfers_of_all_pools(opened: Open) -> None:
    pools = hybrid()
    store = opened(pools)
    store_all(store, pools, keys(2), ["kv", "mamba"])
    store.read_pools([Transfer("mamba", keys(3), pools["mamba"].indices(4, 5, 6))])
    assert [(one.is_read, one.pages) for one in store.take_transfers()] == [(False, 2), (False, 2), (True, 2)]

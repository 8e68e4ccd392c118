"""The memory driver against the contract, its own behaviour, which is eviction, and the shell over it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from hicache.backends import memory
from hicache.backends.base import SetOutcome, StoredPage
from hicache.backends.memory import MemoryDriver
from hicache.backends.stored import StoredPages
from hicache.errors import InvalidInput
from hicache.frame import Compression, FrameCodec
from hicache_lab.conformance import (
    HIT,
    MISS,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    STORED,
    InspectionContract,
    OpenStore,
    OpenStored,
    SoleDriverContract,
    StoreContract,
    Subject,
    bare,
    driver_of,
    load,
    make_keys,
    memory_subject,
    soon,
    store_chain,
)
from tests.seeds import rng, seeds

from ._files import OPENED


def open_memory(codec: FrameCodec, capacity_pages: int | None = None, policy: str = "lru") -> Subject:
    capacity_bytes = None if capacity_pages is None else capacity_pages * codec.frame_bytes
    driver = memory.open_memory(codec, capacity_bytes, policy)
    OPENED.append(backend := bare(driver, codec))
    return memory_subject(backend, driver)


class _Lasting(MemoryDriver):
    """Pages that stay when one of several stores on them is closed."""

    def close(self) -> None:
        """Keep all pages."""


def test_pages_of_mixed_namespaces_are_removed_by_one_call_for_each_namespace() -> None:
    calls: list[tuple[bytes, list[bytes]]] = []

    class Counting(MemoryDriver):
        def remove(
            self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[bytes] | None = None
        ) -> tuple[int, Sequence[str]]:
            calls.append((namespace, list(keys)))
            return super().remove(namespace, keys, deadline, found)

    driver, keys = Counting(), make_keys(4)
    for key in keys:
        for namespace in (NAMESPACE, OTHER_NAMESPACE):
            driver.poke(namespace, key, b"page")
    mixed = [StoredPage(namespace, key, 4, None) for key in keys for namespace in (NAMESPACE, OTHER_NAMESPACE)]
    assert StoredPages(driver, "memory").remove(mixed) == 8
    assert calls == [(namespace, keys) for namespace in sorted((NAMESPACE, OTHER_NAMESPACE))]


class TestInspection(InspectionContract):
    @pytest.fixture
    def driver(self) -> MemoryDriver:
        return _Lasting()

    @pytest.fixture
    def open_store(self, driver: MemoryDriver) -> OpenStore:
        return lambda codec: memory_subject(bare(driver, codec), driver)

    @pytest.fixture
    def open_stored(self, driver: MemoryDriver) -> OpenStored:
        return lambda: StoredPages(driver, "memory")


class TestMemoryDriver(SoleDriverContract):
    machine_examples = 100

    @pytest.fixture
    def open_store(self) -> OpenStore:
        return open_memory


class TestStoreOverMemory(StoreContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return open_memory

    def test_a_rejected_lookup_or_removal_is_counted_by_its_reason(self, store: Subject) -> None:
        """The answer is that of an empty store."""
        backend, keys = store.backend, make_keys(2)
        store_chain(store, keys)
        past = time.monotonic() - 1.0
        assert (backend.batch_exists(keys, deadline=past), backend.delete(keys, deadline=past)) == (0, 0)
        assert backend.statistics().errors == {"deadline": 2}
        backend.close()
        assert (backend.batch_exists(keys, deadline=soon()), backend.delete(keys, deadline=soon())) == (0, 0)
        assert backend.statistics().errors == {"deadline": 2, "closed": 2}


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
@pytest.mark.parametrize("seed", seeds(3))
def test_random_use_keeps_links_and_capacity(seed: int, policy: str) -> None:
    dice = rng(seed)
    store = open_memory(FrameCodec(NAMESPACE, PAYLOAD_BYTES), 10, policy)
    driver = driver_of(store.backend, MemoryDriver)
    chains = [make_keys(6, f"chain {number}") for number in range(5)]
    for _ in range(400):
        chain = dice.choice(chains)
        first = dice.randrange(6)
        action = dice.randrange(6)
        if action < 3:
            store_chain(store, chain[first:], parent=chain[first - 1] if first else None)
        elif action < 5:
            load(store, chain)
        else:
            store.backend.delete([chain[first]], deadline=soon())
        driver.check()


def test_a_page_larger_than_the_capacity_evicts_nothing() -> None:
    keys = make_keys(2)
    packed = FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=Compression())
    plain = packed.frame_bytes
    driver = MemoryDriver(plain // 2)
    OPENED.append(backend := bare(driver, packed))
    store = memory_subject(backend, driver)
    assert store_chain(store, keys[:1]) == [STORED], "half a frame"
    noise = memoryview(bytearray(rng(1).randbytes(plain)))
    assert backend.batch_set(keys[1:], [noise], parent=None, deadline=soon()) == [SetOutcome.REJECTED]
    assert (load(store, keys), backend.statistics().evicted_pages) == ([HIT, MISS], 0)


@pytest.mark.parametrize("how", ["read", "touched"])
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_adaptive_eviction_keeps_popular_chains_that_lru_loses_to_pages_that_are_used_once(
    policy: str, how: str
) -> None:
    """The control is LRU: between two uses of a popular chain more pages are stored than have room."""
    store = open_memory(FrameCodec(NAMESPACE, PAYLOAD_BYTES), 60, policy)
    chains, hits = [make_keys(3, f"popular {number}") for number in range(10)], 0
    for turn in range(300):
        popular = chains[turn % 10]
        if how == "read":
            found = load(store, popular).count(HIT)
        else:
            found = 3 - len(store.backend.batch_touch(popular, deadline=soon()))
        store_chain(store, popular[found:], parent=popular[found - 1] if found else None)
        store_chain(store, make_keys(6, f"once {turn}"))
        hits += found if turn >= 200 else 0
    driver_of(store.backend, MemoryDriver).check()
    assert hits == 0 if policy == "lru" else hits > 200


def test_an_unknown_eviction_policy_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="eviction_policy"):
        memory.open_memory(FrameCodec(NAMESPACE, PAYLOAD_BYTES), 1 << 20, "mru")


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5])
def test_an_invalid_capacity_is_rejected(capacity: object) -> None:
    with pytest.raises(InvalidInput):
        MemoryDriver(capacity)  # type: ignore[arg-type]

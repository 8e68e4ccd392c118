"""The tier for vLLM, driven without vLLM: it stores and reads single chunks, in place and by copies."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.integrations.vllm_tier.identity import ChunkGroup, ChunkLayout, chunk_keys
from hicache.integrations.vllm_tier.lookups import LookupTable
from hicache_lab.clocks import ManualClock
from tests.waiting import wait_for

from .chunk_engine import LAYOUT, NAMESPACE, ROOT, ChunkEngine, Store, engine_on, names_of

BOTH_WAYS = pytest.mark.parametrize("in_place", [False, True])


@BOTH_WAYS
def test_chunks_stored_by_one_engine_are_found_and_read_by_another(in_place: bool, tmp_path: Path) -> None:
    names, path = names_of("a", 20), str(tmp_path / "store")
    with engine_on(path, in_place=in_place) as first:
        assert first.find(names) == [False] * 20
        assert first.save(names) == names
    with engine_on(path, in_place=not in_place) as second:
        assert second.find(names) == [True] * 20
        assert second.fetch(names) == names  # the engine compares the bytes


@BOTH_WAYS
def test_chunks_behind_a_hole_are_found_and_read(in_place: bool) -> None:
    names = names_of("a", 6)
    with engine_on(Store(), in_place=in_place) as engine:
        engine.save(names[:2] + names[3:])
        assert engine.find(names) == [True, True, False, True, True, True]
        assert engine.fetch(names) == names[:2] + names[3:]


def test_a_lookup_is_answered_in_a_later_step_and_then_at_once() -> None:
    names, store = names_of("a", 2), Store()
    with engine_on(store) as engine:
        engine.step()
        store.lookups.clear()
        assert [engine.tier.lookup(name, "r") for name in names] == [None, None]
        engine.step()
        assert store.hanging.acquire(timeout=60)
        assert engine.tier.lookup(names[0], "r") is None
        store.lookups.set()
        assert engine.find(names) == [False, False]
        assert [engine.tier.lookup(name, "r") for name in names] == [False, False]


@BOTH_WAYS
def test_a_damaged_chunk_is_a_miss_and_is_not_offered_again(in_place: bool) -> None:
    names, store = names_of("a", 3), Store()
    with engine_on(store, in_place=in_place) as engine:
        engine.save(names)
        store.damage(chunk_keys(ROOT)(names[1]))
        assert engine.find(names) == [True, True, True]
        assert engine.fetch(names) == [names[0], names[2]]
        assert engine.find(names) == [True, False, True]  # otherwise vLLM would promote it in each step
        engine.save([names[1]])
        assert engine.find(names) == [True, True, True]
        assert engine.fetch(names) == names


def test_lookups_are_kept_until_their_last_request_ends() -> None:
    table = LookupTable(60.0, ManualClock())
    for request in ("r", "s"):
        assert table.ask(b"shared", request) is None
    assert table.ask(b"own", "r") is None
    table.check()
    batch = table.take_new()
    assert batch is not None and [name for name, _ in batch.questions] == [b"shared", b"own"]
    table.forget("r")
    table.check()
    batch.answers = [True, True]
    table.settle(batch)
    assert table.ask(b"shared", "s") is True
    assert table.ask(b"own", "s") is None  # the answer belonged to an ended request
    table.forget("s")
    table.forget("s")
    table.check()


def test_a_lookup_without_an_answer_becomes_a_miss() -> None:
    clock = ManualClock()
    table = LookupTable(1.0, clock)
    assert table.ask(b"a", "r") is None
    clock.advance(1.1)
    assert table.ask(b"a", "r") is False
    batch = table.take_new()
    assert batch is not None
    batch.answers = [True]
    table.settle(batch)
    assert table.ask(b"a", "r") is False, "a late answer is ignored: the request is computed already"


def test_older_chunks_are_not_found_after_a_reset() -> None:
    names, store = names_of("a", 4), Store()
    with engine_on(store) as engine:
        engine.save(names)
        assert engine.find(names, "before") == [True] * 4
        engine.tier.reset(1)
        assert [engine.tier.lookup(name, "before") for name in names] == [False] * 4
        wait_for(lambda: engine.find(names_of("probe", 1), "p") == [False] and bool(engine.save(names_of("x", 1))))
        assert engine.find(names, "after") == [False] * 4
        assert engine.save(names) == names
        assert engine.find(names, "later") == [True] * 4
        wait_for(lambda: store.closed == [NAMESPACE.digest], engine.step)
    assert len(store.drivers) == 2
    with engine_on(store) as engine:  # without a reset
        assert engine.find(names) == [True] * 4


def test_waiting_chunks_are_stored_before_the_tier_closes() -> None:
    names, store = names_of("a", 8), Store()
    with engine_on(store) as engine:
        for name in names:
            engine.begin([name], load=False)
    assert store.driver.measure().pages == 8


def test_a_configuration_error_of_the_store_fails_the_start() -> None:
    store = Store()
    store.refuses = ConfigError("path: not a folder")
    with pytest.raises(ConfigError, match="not a folder"):
        ChunkEngine(store)


# Namespaces

_OTHER_LAYOUTS = {
    "engine": "vllm/0.33.0/cuda",
    "dtype": "float8_e4m3fn",
    "kv_layout": "BLHNC",
    "groups": (ChunkGroup(0, 16, ("layer.1", "layer.0")),),
    "chunk_bytes": 16384,
    "chunk_blocks": 8,
    "hash_tokens": 8,
    "is_canonical": True,
    "is_replicated": True,
    "tp_size": 2,
    "pp_size": 2,
    "cp_size": 2,
    "dcp_size": 2,
}


def test_each_difference_between_engines_changes_the_namespace() -> None:
    assert set(_OTHER_LAYOUTS) == {field.name for field in dataclasses.fields(ChunkLayout)}
    others = [
        dataclasses.replace(LAYOUT, **{name: value}).namespace("weights", "model")  # type: ignore[arg-type]
        for name, value in _OTHER_LAYOUTS.items()
    ]
    digests = {one.digest for one in (NAMESPACE, LAYOUT.namespace("others", "model"), *others)}
    assert len(digests) == len(_OTHER_LAYOUTS) + 2
    assert LAYOUT.namespace("weights", "another label").digest == NAMESPACE.digest


def test_groups_of_one_model_share_a_namespace_but_not_keys() -> None:
    full, window = names_of("a", 3, group=0), names_of("a", 3, group=1)
    with engine_on(Store()) as engine:
        engine.save(full)
        assert engine.find(full + window) == [True] * 3 + [False] * 3
        engine.save(window)
        assert engine.fetch(full + window) == full + window


def test_engines_with_different_root_hashes_do_not_share_chunks() -> None:
    names, store = names_of("a", 3), Store()
    with engine_on(store) as engine:
        engine.save(names)
    with engine_on(store, root=b"\0" * 16) as other:
        assert other.find(names) == [False] * 3
    with engine_on(store, root=ROOT) as same:
        assert same.find(names) == [True] * 3


def test_the_page_size_is_that_of_the_shortest_chunk_within_the_limit_of_a_page() -> None:
    groups = (ChunkGroup(0, 528, ("mamba",)), ChunkGroup(1, 528, ("attention",)))
    long = dataclasses.replace(LAYOUT, groups=groups)
    assert (LAYOUT.chunk_tokens, long.chunk_tokens) == (64, 1024)

"""The eviction policy `adaptive` of shared files: the sweeping engine keeps what all engines use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.store import Store
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import NAMESPACE, STORED, Subject, make_keys
from tests.seeds import rng

from ._files import CODEC, OPENED
from ._shared import open_limited
from .test_limit import evicted, limit_of, sweep
from .test_shared_files_sweeps import REJECTED, exists, load, pass_interval, put

PAGES = 160
POPULAR = [make_keys(4, f"popular {number}") for number in range(25)]


def opened(root: Path, pages: int = PAGES, *, adaptive: bool = True) -> tuple[Subject, ManualClock]:
    """Open an engine that has looked who sweeps."""
    clock = ManualClock()
    store = open_limited(root, pages, clock, adaptive=adaptive)
    pass_interval(store, clock)
    return store, clock


class Keeps:
    """In place of `AdaptivePages`: keeps some pages, and records the prompts."""

    def __init__(self, store: Subject, *kept: bytes) -> None:
        self.kept = {NAMESPACE + key for key in kept}
        self.prompts: list[list[bytes]] = []
        limit_of(store)._adaptive = cast(Any, self)

    def use_prompt(self, keys: Sequence[bytes]) -> None:
        self.prompts.append([key.removeprefix(NAMESPACE) for key in keys])

    def keeps(self, key: bytes, parent_of: object) -> bool:
        return key in self.kept


def late_hits(root: Path, *, adaptive: bool) -> int:
    """One engine sweeps, and stores chains that are never used again. Return the last hits of another one, which uses
    popular chains."""
    dice, hits = rng(1), []
    sweeper, clock = opened(root, adaptive=adaptive)
    other, other_clock = opened(root, adaptive=adaptive)
    for number in range(140):
        for part in range(3):
            put(sweeper, make_keys(4, f"once {number} {part}"))
        pass_interval(sweeper, clock)
        pass_interval(other, other_clock)
        keys = dice.choice(POPULAR)
        hits.append(load(other, keys))
        put(other, keys)
    return sum(hits[-40:])


@pytest.mark.long
def test_the_engine_that_sweeps_keeps_what_another_one_uses_again_and_again(tmp_path: Path) -> None:
    """The control: with lru it evicts it."""
    found = {adaptive: late_hits(tmp_path / f"{adaptive}", adaptive=adaptive) for adaptive in (False, True)}
    assert found[True] > 2 * found[False], found


def test_kept_chains_stay_as_long_as_there_are_others_and_then_go_tails_first(tmp_path: Path) -> None:
    store, clock = opened(tmp_path / "s", 12)
    old, new, more = make_keys(6, "old"), make_keys(6, "new"), make_keys(12, "more")
    keeps = Keeps(store, old[-1])
    assert put(store, old) == [STORED] * 6
    pass_interval(store, clock)
    assert put(store, new) == [STORED] * 6
    sweep(store, clock)
    assert (exists(store, old), exists(store, new)) == (6, 4)
    keeps.kept |= {NAMESPACE + key for key in new}
    assert put(store, more)[-1] is REJECTED
    sweep(store, clock)
    assert (exists(store, old), exists(store, new), evicted(store)) == (6, 4, 4)
    keeps.kept |= {NAMESPACE + key for key in more}
    assert put(store, more)[-1] is REJECTED
    sweep(store, clock)
    assert (exists(store, old), exists(store, new), exists(store, more)) == (4, 4, 2), "there is always room"


def test_a_new_sweeper_learns_the_chains_of_the_store_from_headers_and_then_only_changes(tmp_path: Path) -> None:
    root, chains = tmp_path / "s", [make_keys(3, f"chain {number}") for number in range(4)]
    first, clock = opened(root, 12)
    for keys in chains[:3]:
        assert put(first, keys) == [STORED] * 3
        pass_interval(first, clock)
    first.backend.close()
    store, clock = opened(root, 12)
    keeps = Keeps(store)
    assert put(store, chains[3]) == [STORED] * 3
    sweep(store, clock)
    assert keeps.prompts == chains
    keeps.prompts.clear()
    clock.advance(600.0)
    assert load(store, chains[1]) == 3
    assert put(store, make_keys(3, "more"))[-1] is REJECTED
    sweep(store, clock)
    assert chains[1] in keeps.prompts and chains[2] not in keeps.prompts and chains[3] not in keeps.prompts


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_the_policy_is_that_of_the_configuration(tmp_path: Path, policy: str) -> None:
    store = open_spec(BackendSpec("shared_files", {"path": tmp_path / "s", "eviction_policy": policy}), CODEC)
    assert isinstance(store, Store) and store._limit is not None
    OPENED.append(store)
    assert (store._limit._adaptive is not None) == (policy == "adaptive")

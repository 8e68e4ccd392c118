"""Compositions among threads: whatever moves in the background, a hit is the right page, a deleted page stays away."""

from __future__ import annotations

import random

import pytest

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.compose import LevelsBackend
from hicache.backends.testing import empty_frames, full_frames, holds, in_threads, make_keys, soon
from tests.seeds import rng, seeds

from .._troubled import CODEC, Troubled
from ._parts import PAGE, named, settle

CHAINS = [make_keys(12, f"chain {number}") for number in range(4)]
ROUNDS = 120


def use(backend: LevelsBackend, parts: list[Troubled], dice: random.Random) -> None:
    """Random verbs; each frame is overwritten at once when its call has returned. Now and then a part hurts a page or
    is down for a moment."""
    for _ in range(ROUNDS):
        chain = dice.choice(CHAINS)
        first = dice.randrange(12)
        keys = chain[first : first + dice.randrange(1, 8)]
        action = dice.randrange(20)
        if action < 8:
            frames = full_frames(CODEC, keys)
            parent = chain[first - 1] if first else None
            outcomes = backend.batch_set(keys, frames, parent=parent, deadline=soon())
            assert all(type(outcome) is SetOutcome for outcome in outcomes)
        elif action < 16:
            frames = empty_frames(CODEC, len(keys))
            found = backend.batch_get(keys, frames, deadline=soon())
            for key, frame, outcome in zip(keys, frames, found, strict=True):
                assert outcome is not GetOutcome.HIT or holds(CODEC, key, frame), "a wrong page was served"
        elif action == 16:
            assert 0 <= backend.batch_exists(keys, deadline=soon()) <= len(keys)
            continue
        elif action == 17:
            assert 0 <= backend.delete(keys, deadline=soon()) <= len(keys)
            continue
        elif action == 18:
            part = dice.choice(parts)
            if part.peek(keys[0]) is not None:
                part.poke(keys[0], bytes(PAGE))
            continue
        else:
            part = dice.choice(parts)
            part.down = not part.down
            continue
        for frame in frames:
            frame[:] = b"\xee" * PAGE


@pytest.mark.usefixtures("threads_switch_often")
@pytest.mark.parametrize("seed", seeds(3))
def test_random_use_by_many_threads_serves_no_wrong_page_and_forgets_what_is_deleted(seed: int) -> None:
    parts = [Troubled(capacity_bytes=15 * PAGE), Troubled()]
    backend = LevelsBackend(CODEC, named(*parts), cascade_bytes_max=9 * PAGE)
    in_threads(4, lambda number: use(backend, parts, rng(10 * seed + number)))
    for part in parts:
        part.down = False
    for chain in CHAINS:
        backend.delete(chain, deadline=soon())
    settle(backend)
    assert [part.usage().pages for part in parts] == [0, 0]
    for part in parts:
        part.check()
    backend.close()
    assert all(copies.waiting == 0 for copies in backend.copies().values())

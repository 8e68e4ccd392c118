"""What is a mirror's own: stores on all parts, reads from the fastest, repair from the good copy."""

from __future__ import annotations

import pytest

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.compose import MirrorBackend
from hicache.backends.compose.mirror import EXPLORE_EVERY, Pace
from hicache.backends.guard import GuardedBackend
from hicache.backends.testing import (
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    SET_ERROR,
    STORED,
    Store,
    full_frames,
    load,
    make_keys,
    soon,
    store_chain,
)
from hicache.errors import BackendError, InvalidInput
from hicache.frame import FrameCodec

from ._parts import CODEC, COPIES, PAGE, Switched, named, settle


class World:
    """A mirror of memory parts, on a clock of its own."""

    def __init__(self, parts: int = 2, quorum: int = 1, codec: FrameCodec = CODEC) -> None:
        self.now_s = 0.0
        self.parts = [Switched(codec) for _ in range(parts)]
        self.backend = MirrorBackend(
            codec, named(*self.parts), write_quorum=quorum, copy_bytes_max=COPIES, clock=lambda: self.now_s
        )
        self.store = Store(self.backend, self.parts[0].peek, self.parts[0].poke)

    def on(self, part: int, keys: list[bytes]) -> list[bool]:
        return [self.parts[part].peek(key) is not None for key in keys]


def test_a_store_reaches_all_parts_within_the_call_and_alike() -> None:
    world, keys = World(3), make_keys(4)
    assert store_chain(world.store, keys) == [STORED] * 4
    for key in keys:
        raw = {part.peek(key) for part in world.parts}
        assert len(raw) == 1 and None not in raw
    assert store_chain(world.store, keys) == [PRESENT] * 4
    world.backend.close()


def test_keyed_pages_are_sealed_once_and_whole_on_all_parts() -> None:
    """Each seal with a key takes a new nonce: two parts that sealed one frame at once would tear its header."""
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[b"k" * 32])
    world = World(3, codec=codec)
    for batch in range(20):
        keys = make_keys(6, f"batch {batch}")
        store_chain(world.store, keys)
        for key in keys:
            raw = {part.peek(key) for part in world.parts}
            assert len(raw) == 1 and codec.check(key, memoryview(raw.pop() or b"")) is None
    world.backend.close()


def test_one_part_may_be_down() -> None:
    world, keys = World(), make_keys(4)
    store_chain(world.store, keys[:2])
    for part in (0, 1):
        world.parts[part].down = True
        assert world.backend.batch_exists(keys[:2], deadline=soon()) == 2
        assert load(world.store, keys[:2]) == [HIT] * 2
        assert store_chain(world.store, keys[2:], keys[1])[0].is_stored
        world.parts[part].down = False
    assert load(world.store, keys) == [HIT] * 4
    world.backend.close()


@pytest.mark.parametrize(("quorum", "expected"), [(1, STORED), (2, SET_ERROR)])
def test_the_quorum_decides_what_counts_as_stored(quorum: int, expected: SetOutcome) -> None:
    world, keys = World(quorum=quorum), make_keys(2)
    world.parts[1].down = True
    assert store_chain(world.store, keys) == [expected] * 2
    world.parts[1].down = False
    assert store_chain(world.store, keys) == [PRESENT] * 2, "now both have it"
    world.backend.close()


def test_a_part_that_is_full_is_no_error_below_the_quorum() -> None:
    parts = [Switched(), Switched(capacity_bytes=PAGE)]
    backend = MirrorBackend(CODEC, named(*parts), write_quorum=2, copy_bytes_max=COPIES)
    keys = make_keys(2)
    assert store_chain(Store(backend, parts[0].peek, parts[0].poke), keys) == [STORED, SetOutcome.REJECTED]
    backend.close()


@pytest.mark.parametrize("damage", [b"", b"x" * PAGE])
def test_a_page_that_one_part_lacks_or_has_damaged_is_repaired_from_the_other(damage: bytes) -> None:
    world, keys = World(), make_keys(3)
    store_chain(world.store, keys)
    load(world.store, keys)
    load(world.store, keys)  # both are measured
    for part in world.parts:
        if damage:
            part.poke(keys[1], damage)
        else:
            part.delete([keys[1]], deadline=soon())
        good = next(other for other in world.parts if other is not part)
        for _ in range(EXPLORE_EVERY):
            assert load(world.store, keys) == [HIT] * 3
        settle(world.backend)
        assert part.peek(keys[1]) == good.peek(keys[1])
    assert world.backend.statistics().corrupt == {}
    world.backend.close()


def test_a_page_damaged_on_all_parts_is_corrupt_and_gone() -> None:
    """The control of the test above: it is the good copy that saves the page."""
    world, keys = World(), make_keys(2)
    store_chain(world.store, keys)
    for part in world.parts:
        part.poke(keys[1], b"x" * PAGE)
    assert load(world.store, keys) == [HIT, GetOutcome.CORRUPT]
    assert load(world.store, keys) == [HIT, MISS]
    assert world.backend.statistics().corrupt == {"every_copy": 1}
    world.backend.close()


def slow(world: World, part: int, seconds: float) -> None:
    """Let reads of a part take so long by the world's clock."""
    backend = world.parts[part]

    class Slow(Switched):
        def batch_get(self, *args: object, **kwargs: object) -> list[GetOutcome]:
            world.now_s += seconds
            return super().batch_get(*args, **kwargs)  # type: ignore[arg-type]

    backend.__class__ = Slow


def test_reads_go_to_the_faster_part_and_follow_a_change() -> None:
    world, keys = World(), make_keys(2)
    store_chain(world.store, keys)
    for fast in (0, 1):
        slow(world, fast, 0.001)
        slow(world, 1 - fast, 0.5)
        for _ in range(12 * EXPLORE_EVERY):
            load(world.store, keys)
        before = [len(part.called("get")) for part in world.parts]
        for _ in range(EXPLORE_EVERY):
            load(world.store, keys)
        asked = [len(part.called("get")) - count for part, count in zip(world.parts, before, strict=True)]
        assert asked[fast] == EXPLORE_EVERY - 1 and asked[1 - fast] == 1
    world.backend.close()


def test_a_part_that_fails_is_asked_last() -> None:
    pace = Pace(3)
    for part, seconds in enumerate((1.0, 2.0, 3.0)):
        pace.note(part, seconds, [HIT])
    assert pace.order() == [0, 1, 2]
    pace.note(0, 0.0, [GetOutcome.ERROR])
    assert pace.order() == [1, 2, 0], "an error that comes quickly is no speed"
    pace.note(1, 0.0, [MISS])
    assert pace.order() == [1, 2, 0], "nor is a miss"
    pace.note(0, 1.0, [HIT])
    assert pace.order() == [0, 1, 2]


def test_every_other_part_is_tried_in_its_turn() -> None:
    pace = Pace(3)
    for part, seconds in enumerate((1.0, 2.0, 3.0)):
        pace.note(part, seconds, [HIT])
    firsts = [pace.order(explore=True)[0] for _ in range(4 * EXPLORE_EVERY)]
    assert firsts.count(1) == firsts.count(2) == 2


def test_a_page_on_all_parts_is_deleted_once_and_from_all() -> None:
    world, keys = World(3), make_keys(4)
    store_chain(world.store, keys[:3])
    world.parts[0].delete(keys[:1], deadline=soon())
    assert world.backend.delete(keys, deadline=soon()) == 3
    assert [part.usage().pages for part in world.parts] == [0, 0, 0]
    world.backend.close()


def test_a_part_that_hangs_is_left_at_the_deadline_and_the_other_counts() -> None:
    world, keys = World(), make_keys(2)
    world.parts[1].hanging = True
    frames = full_frames(CODEC, keys)
    assert world.backend.batch_set(keys, frames, parent=None, deadline=soon(0.05)) == [STORED] * 2
    world.parts[1].released.set()
    assert world.on(0, keys) == [True] * 2 and world.on(1, keys) == [False] * 2
    world.backend.close()


def test_a_part_that_raises_is_contained_by_its_guard() -> None:
    class Raising(Switched):
        def batch_set(self, *args: object, **kwargs: object) -> list[SetOutcome]:
            raise RuntimeError("a bug")

    good = Switched()
    backend = MirrorBackend(
        CODEC, named(good, GuardedBackend(Raising())), write_quorum=1, copy_bytes_max=COPIES
    )
    for number in range(20):
        keys = make_keys(2, str(number))
        assert store_chain(Store(backend, good.peek, good.poke), keys) == [STORED] * 2
    assert backend.statistics().errors["raised_RuntimeError"] > 0
    backend.close()


def test_all_parts_are_closed_even_if_one_raises() -> None:
    world = World(3)
    world.parts[0].refuses_to_close = True
    with pytest.raises(BackendError, match="does not close"):
        world.backend.close()
    world.backend.close()
    assert [part.closes for part in world.parts] == [1, 1, 1]


def test_what_cannot_be_a_mirror_is_refused() -> None:
    parts = named(Switched(), Switched())
    with pytest.raises(InvalidInput, match="two or more"):
        MirrorBackend(CODEC, parts[:1], write_quorum=1, copy_bytes_max=COPIES)
    for quorum in (0, 3, True, 1.0):
        with pytest.raises(InvalidInput, match="write_quorum"):
            MirrorBackend(CODEC, parts, write_quorum=quorum, copy_bytes_max=COPIES)  # type: ignore[arg-type]

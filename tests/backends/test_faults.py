"""Injected faults: their effects, their counts, and that equal seeds give equal faults."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.faults import INJECTED, FaultyBackend
from hicache.backends.guard import GuardedBackend
from hicache.backends.memory import MemoryBackend
from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.testing import (
    CORRUPT,
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    STORED,
    OpenStore,
    SoleBackendContract,
    Store,
    empty_frames,
    full_frames,
    holds,
    in_parts,
    make_keys,
    soon,
)
from hicache.config.guard import GuardConfig, InjectConfig
from hicache.errors import ConfigError
from hicache.frame import FrameCodec, TagKind
from tests.waiting import wait_for

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
KEYS = make_keys(20)


class TestFaultlessFaultyBackend(SoleBackendContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        def open_it(codec: FrameCodec) -> Store:
            memory = MemoryBackend(codec)
            return Store(FaultyBackend(memory), memory.peek, memory.poke)

        return open_it


def faulty(options: InjectConfig | None = None, codec: FrameCodec = CODEC) -> FaultyBackend:
    return FaultyBackend(MemoryBackend(codec), options)


@pytest.fixture
def full() -> Iterator[FaultyBackend]:
    backend = faulty()
    put(backend)
    yield backend
    backend.close()


def put(backend: FaultyBackend, *, deadline: float | None = None) -> list[SetOutcome]:
    return backend.batch_set(KEYS, full_frames(CODEC, KEYS), parent=None, deadline=deadline or soon())


def get(backend: FaultyBackend, *, deadline: float | None = None) -> list[GetOutcome]:
    return backend.batch_get(KEYS, empty_frames(CODEC, len(KEYS)), deadline=deadline or soon())


def test_all_calls_fail_on_request_and_are_counted(full: FaultyBackend) -> None:
    full.fail()
    assert get(full) == [GetOutcome.ERROR] * 20 and put(full) == [SetOutcome.ERROR] * 20
    assert full.batch_exists(KEYS, deadline=soon()) == full.delete(KEYS, deadline=soon()) == 0
    assert full.batch_has(KEYS, deadline=soon()) == [False] * 20 and full.clear(deadline=soon()) == 0
    found = full.statistics()
    assert found.errors == {INJECTED: 44}
    assert found.gets[GetOutcome.ERROR] == found.sets[SetOutcome.ERROR] == 20
    full.fail(False)
    assert get(full) == [HIT] * 20


def test_a_share_of_calls_fails() -> None:
    backend = faulty(InjectConfig(error_share=0.25, seed=3))
    failed = sum(put(backend)[0] is SetOutcome.ERROR for _ in range(400))
    assert 60 <= failed <= 140


def test_equal_seeds_draw_equal_faults() -> None:
    def history(seed: int) -> list[int]:
        backend = faulty(InjectConfig(error_share=0.3, seed=seed))
        return [backend.batch_exists(KEYS[:1], deadline=soon()) + len(backend.statistics().errors) for _ in range(50)]

    assert history(5) == history(5)
    assert history(5) != history(6)


def test_a_share_of_pages_is_damaged_found_and_removed() -> None:
    backend = faulty(InjectConfig(damage_share=0.5, seed=1))
    put(backend)
    outcomes = get(backend)
    damaged = outcomes.count(CORRUPT)
    assert 0 < damaged < 20 and outcomes.count(HIT) == 20 - damaged
    assert backend.usage().pages == 20 - damaged
    found = backend.statistics()
    assert found.corrupt == {INJECTED: damaged}
    assert (found.gets[HIT], found.gets[CORRUPT]) == (20 - damaged, damaged)


def test_a_page_read_into_parts_is_damaged_like_one_in_a_frame() -> None:
    backend = faulty(InjectConfig(damage_share=0.5, seed=1))
    put(backend)
    views = [in_parts(CODEC, frame) for frame in empty_frames(CODEC, len(KEYS))]
    outcomes = backend.batch_get(KEYS, views, deadline=soon())
    assert 0 < outcomes.count(CORRUPT) < 20 and set(outcomes) == {HIT, CORRUPT}
    for key, view, outcome in zip(KEYS, views, outcomes, strict=True):
        assert holds(CODEC, key, view) is (outcome is HIT)


def test_without_a_tag_the_same_damage_goes_through() -> None:
    """The control of the test above: the tag detects the damage."""
    plain = FrameCodec(NAMESPACE, PAYLOAD_BYTES, tag=TagKind.NONE)
    backend = faulty(InjectConfig(damage_share=0.5, seed=1), plain)
    put(backend)
    assert get(backend) == [HIT] * 20


def test_a_delay_longer_than_the_deadline_is_an_error_by_the_deadline() -> None:
    backend = faulty(InjectConfig(latency=1000.0))
    assert get(backend, deadline=soon(0.02)) == [GetOutcome.ERROR] * 20


def test_bandwidth_limits_the_pages_moved_in_time() -> None:
    """One batch takes a millisecond: the first one is in time, the last of a thousand at once is not."""
    batch_bytes = 20 * CODEC.frame_bytes
    backend = faulty(InjectConfig(bandwidth=1000 * batch_bytes))
    assert put(backend) == [STORED] * 20
    narrow = faulty(InjectConfig(bandwidth=batch_bytes / 1000))
    assert put(narrow, deadline=soon(0.02)) == [SetOutcome.ERROR] * 20
    assert narrow.batch_exists(KEYS, deadline=soon(0.02)) == 0, "a small call did not wait behind a large one"
    assert narrow.statistics().errors == {INJECTED: 21}


def test_a_hanging_call_waits_until_it_is_released(full: FaultyBackend) -> None:
    with ThreadPoolExecutor(3) as threads:
        full.hang()
        calls = [threads.submit(get, full) for _ in range(3)]
        wait_for(lambda: full.hung_calls == 3)
        assert not any(call.done() for call in calls)
        full.release()
        assert [call.result() for call in calls] == [[HIT] * 20] * 3
    assert full.hung_calls == 0


def test_closing_releases_hanging_calls() -> None:
    backend = faulty()
    backend.hang()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(get, backend)
        wait_for(lambda: backend.hung_calls == 1)
        backend.close()
        assert call.result() in ([MISS] * 20, [GetOutcome.ERROR] * 20)


# Where faults are injected


def test_faults_are_injected_between_the_guard_and_the_backend() -> None:
    guard = open_spec(BackendSpec("memory", guard=GuardConfig(inject={"error_share": 1.0}, failures=50)), CODEC)
    assert isinstance(guard, GuardedBackend)
    (inner,) = guard.parts
    assert isinstance(inner, FaultyBackend) and isinstance(inner.parts[0], MemoryBackend)
    assert guard.batch_set(KEYS, full_frames(CODEC, KEYS), parent=None, deadline=soon()) == [SetOutcome.ERROR] * 20
    guard.close()


def test_a_guard_is_added_unless_it_is_disabled() -> None:
    guard = open_spec(BackendSpec("memory"), CODEC)
    assert isinstance(guard, GuardedBackend) and guard.name == "memory"
    assert isinstance(open_spec(BackendSpec("memory", guard=None), CODEC), MemoryBackend)
    named = open_spec(BackendSpec("memory", name="near"), CODEC)
    assert isinstance(named, GuardedBackend) and named.name == "near"
    assert put_one(guard) == [STORED]


def put_one(backend: GuardedBackend) -> list[SetOutcome]:
    return backend.batch_set(KEYS[:1], full_frames(CODEC, KEYS[:1]), parent=None, deadline=soon())


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        ({"failures": 0}, "failures"),
        ({"failurs": 3}, "failurs"),
        ({"inject": {"error_share": 2}}, "error_share"),
        ({"inject": {"chaos": True}}, "chaos"),
    ],
)
def test_wrong_options_of_a_guard_are_rejected(guard: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GuardConfig(**guard)

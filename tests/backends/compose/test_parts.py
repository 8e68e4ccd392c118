"""Opening and closing the parts of a composition, and what a configuration may say about them."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import GetOutcome, SetOutcome, StorageBackend, leaves
from hicache.backends.compose import LevelsBackend, MirrorBackend, ShardedBackend
from hicache.backends.compose.late import RETRY_S_MIN, LatePart
from hicache.backends.guard import GuardedBackend
from hicache.backends.memory import MemoryBackend
from hicache.backends.registry import (
    BackendSpec,
    PartSpec,
    backend_names,
    check_backend,
    open_backend,
    open_raw,
    open_spec,
    part_specs,
)
from hicache.backends.testing import HIT, STORED, Store, empty_frames, full_frames, load, make_keys, soon, store_chain
from hicache.config.composed_storage import PARTS_MAX
from hicache.config.guard import GuardConfig
from hicache.errors import BackendUnavailable, ConfigError, InvalidInput, NotOurs
from hicache.frame import FrameCodec
from tests.test_supervised import no_threads
from tests.waiting import wait_for

from .._files import open_descriptors
from ._parts import CODEC, PAGE, Switched

OPENED: list[Switched] = []
REFUSING = threading.Event()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What a test has opened is closed, once."""
    OPENED.clear()
    REFUSING.clear()
    yield
    assert [backend.closes for backend in OPENED] == [1] * len(OPENED)


def open_switched(codec: FrameCodec) -> Switched:
    """A factory whose backends can be found, and which refuses while REFUSING is set."""
    if REFUSING.is_set():
        raise BackendUnavailable("this server is not up yet")
    OPENED.append(Switched(codec))
    return OPENED[-1]


SWITCHED = f"{__name__}:open_switched"
MEMORY: dict[str, Any] = {"type": "memory"}


def test_compositions_are_built_in() -> None:
    assert {"levels", "mirror", "sharded"} <= set(backend_names())


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("levels", {"levels": [MEMORY, MEMORY], "promote": False, "write": "selective", "selective_hits": 3,
                    "cascade_bytes_max": 5 * PAGE}, LevelsBackend),
        ("mirror", {"parts": [MEMORY, MEMORY], "write_quorum": 2, "repair_bytes_max": 5 * PAGE}, MirrorBackend),
        ("sharded", {"parts": [{**MEMORY, "name": "a"}, {**MEMORY, "name": "b"}]}, ShardedBackend),
    ],
)  # fmt: skip
def test_a_composition_opens_by_name_with_a_guard_before_each_part(
    name: str, options: dict[str, Any], kind: type[StorageBackend]
) -> None:
    check_backend(name, options)
    backend = open_spec(BackendSpec(name, options), CODEC)
    assert isinstance(backend, kind) and isinstance(backend, (LevelsBackend, MirrorBackend, ShardedBackend))
    assert all(isinstance(part, GuardedBackend) for part in backend.parts)
    assert all(isinstance(leaf, MemoryBackend) for leaf in leaves(backend))
    store = Store(backend, lambda key: None, lambda key, data: None)
    assert store_chain(store, make_keys(3)) == [STORED] * 3
    assert load(store, make_keys(3)) == [HIT] * 3
    backend.close()


def test_a_part_takes_options_of_its_own_and_of_its_guard() -> None:
    part = {"type": "memory", "options": {"capacity_bytes": 3 * PAGE}, "guard": {"failures": 9}, "name": "small"}
    backend = open_backend("levels", CODEC, {"levels": [part, MEMORY]})
    assert isinstance(backend, LevelsBackend)
    small = backend.parts[0]
    assert isinstance(small, GuardedBackend) and small.options.failures == 9 and backend.names == ("small", "memory")
    assert backend.parts[0].usage().capacity_bytes == 3 * PAGE
    backend.close()


def test_compositions_nest() -> None:
    mirrors = [{"type": "mirror", "name": name, "options": {"parts": [MEMORY, MEMORY]}} for name in "ab"]
    options = {"levels": [MEMORY, {"type": "sharded", "options": {"parts": mirrors}}]}
    check_backend("levels", options)
    backend = open_backend("levels", CODEC, options)
    assert len(list(leaves(backend))) == 5
    backend.close()


def test_parts_without_names_are_called_like_their_types() -> None:
    parts = part_specs("levels", {"levels": [MEMORY, {"type": "file", "options": {"path": "x"}}, MEMORY]})
    assert [part.name for part in parts] == ["memory", "file", "memory-2"]
    assert parts[0] == PartSpec("memory", BackendSpec("memory", {}, GuardConfig(), "memory"))
    assert part_specs("file", {"path": "x"}) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": []}, "levels: expected at least 2, got 0"),
        ({"levels": [MEMORY]}, "levels: expected at least 2, got 1"),
        ({"levels": [MEMORY] * (PARTS_MAX + 1)}, f"expected at most {PARTS_MAX}"),
        ({"levels": "file"}, "levels: expected a list"),
        ({"levels": [MEMORY, "file"]}, r"levels\.1: "),
        ({"levels": [MEMORY, {"type": 5}]}, r"levels\.1\.type: expected text"),
        ({"levels": [MEMORY, {**MEMORY, "nmae": "x"}]}, r"levels\.1.*nmae: unknown entry"),
        ({"levels": [MEMORY, {**MEMORY, "options": 5}]}, "options: "),
        ({"levels": [MEMORY, {**MEMORY, "guard": 5}]}, "guard: "),
        ({"levels": [MEMORY, {**MEMORY, "name": ""}]}, r"levels\.1\.name: "),
        ({"levels": [MEMORY, {**MEMORY, "optional": "perhaps"}]}, "optional: expected true or false"),
        ({"levels": [{**MEMORY, "name": "x"}, {**MEMORY, "name": "x"}]}, "named 'x'"),
        ({"levels": [MEMORY, {"type": "memroy"}]}, "part memroy: .*did you mean 'memory'"),
        ({"levels": [MEMORY, {"type": "memory", "options": {"capasity_bytes": 1}}]}, "part memory-2: .*capacity_bytes"),
        ({"levels": [MEMORY, {"type": "mirror", "options": {"parts": [MEMORY]}}]}, "parts: expected at least 2"),
        ({"levels": [MEMORY, MEMORY], "wirte": "through"}, "did you mean write"),
    ],
)
def test_a_wrong_list_of_parts_is_refused_before_anything_is_opened(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_backend("levels", options)
    with pytest.raises(ConfigError, match=message):
        open_backend("levels", CODEC, options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("levels", {"write": "back"}, "write: expected 'through', 'on_eviction' or"),
        ("levels", {"cascade_bytes_max": 1}, "hold no page"),
        ("levels", {"selective_hits": 0}, "selective_hits"),
        ("levels", {"write": "on_eviction", "levels": [{**MEMORY, "optional": True}, MEMORY]}, "may be optional"),
        ("levels", {"write": "on_eviction", "levels": [
            {"type": "mirror", "options": {"parts": [MEMORY, {**MEMORY, "optional": True}]}}, MEMORY,
        ]}, "may be optional"),
        ("mirror", {"write_quorum": 3}, "write_quorum"),
        ("mirror", {"repair_bytes_max": 0}, "repair_bytes_max"),
        ("mirror", {"repair_bytes_max": 1}, "hold no page"),
        ("sharded", {}, "needs a name"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused_and_what_was_opened_is_closed(
    name: str, options: dict[str, Any], message: str
) -> None:
    parts = [{"type": SWITCHED}] * 2
    with pytest.raises(ConfigError, match=message):
        open_backend(name, CODEC, {"levels" if name == "levels" else "parts": parts, **options})


def test_if_one_part_cannot_be_opened_those_before_it_are_closed(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("")
    parts = [{"type": SWITCHED}, {"type": "file", "options": {"path": str(tmp_path)}}, {"type": SWITCHED}]
    with pytest.raises(NotOurs):
        open_backend("levels", CODEC, {"levels": parts})
    assert len(OPENED) == 1


def test_an_optional_part_that_cannot_be_opened_is_taken_in_later() -> None:
    REFUSING.set()
    parts = [MEMORY, {"type": SWITCHED, "name": "remote", "optional": True}]
    backend = open_backend("levels", CODEC, {"levels": parts})
    assert isinstance(backend, LevelsBackend)
    store, keys = Store(backend, lambda key: None, lambda key, data: None), make_keys(4)
    assert store_chain(store, keys[:2]) == [STORED] * 2
    assert load(store, keys[:2]) == [HIT] * 2
    assert backend.batch_exists(keys, deadline=soon()) == 2
    assert backend.statistics().errors["not_open"] > 0
    assert len(list(leaves(backend))) == 1, "a part that is not open has no leaves"
    REFUSING.clear()
    wait_for(lambda: bool(OPENED))
    wait_for(lambda: backend.batch_exists(keys[:2], deadline=soon()) == 2 and len(list(leaves(backend))) == 2)
    store_chain(store, keys)
    wait_for(lambda: OPENED[0].peek(keys[3]) is not None)
    backend.close()


def test_a_part_that_is_not_optional_has_to_open() -> None:
    """The control of the test above."""
    REFUSING.set()
    with pytest.raises(BackendUnavailable):
        open_backend("levels", CODEC, {"levels": [MEMORY, {"type": SWITCHED}]})


def test_a_wrong_option_of_an_optional_part_is_refused_at_once() -> None:
    part = {"type": "memory", "options": {"capacity_bytes": -1}, "optional": True}
    with pytest.raises(ConfigError, match="capacity_bytes"):
        open_backend("levels", CODEC, {"levels": [MEMORY, part]})


def test_a_late_part_answers_with_errors_until_it_is_open_and_checks_its_arguments() -> None:
    REFUSING.set()
    part = LatePart(CODEC, "late", lambda: open_switched(CODEC))
    keys = make_keys(2)
    frames = full_frames(CODEC, keys)
    assert part.batch_exists(keys, deadline=soon()) == 0
    assert part.batch_get(keys, empty_frames(CODEC, 2), deadline=soon()) == [GetOutcome.ERROR] * 2
    assert part.batch_set(keys, frames, parent=None, deadline=soon()) == [SetOutcome.ERROR] * 2
    assert part.delete(keys, deadline=soon()) == part.clear(deadline=soon()) == 0
    assert part.batch_has(keys, deadline=soon()) == [False] * 2
    assert part.usage().pages == 0
    assert part.statistics().errors == {"not_open": 9}
    with pytest.raises(InvalidInput):
        part.batch_get(keys, frames[:1], deadline=soon())
    part.close()
    assert part.batch_exists(keys, deadline=soon()) == 0


def test_what_was_asked_before_a_part_was_open_still_counts_when_it_is() -> None:
    REFUSING.set()
    part, keys = LatePart(CODEC, "late", lambda: open_switched(CODEC)), make_keys(2)
    frames = full_frames(CODEC, keys)
    part.batch_set(keys, frames, parent=None, deadline=soon())
    part.batch_get(keys, frames, deadline=soon())
    REFUSING.clear()
    wait_for(lambda: bool(part.parts))
    assert part.batch_set(keys, frames, parent=None, deadline=soon()) == [STORED] * 2
    found = part.statistics()
    assert found.sets == {SetOutcome.ERROR: 2, STORED: 2} and found.gets == {GetOutcome.ERROR: 2}
    assert found.errors == {"not_open": 4}
    part.close()


def test_a_late_part_that_got_no_thread_is_opened_once_there_are_threads() -> None:
    REFUSING.set()
    with no_threads():
        part = LatePart(CODEC, "late", lambda: open_switched(CODEC))
        REFUSING.clear()
        time.sleep(RETRY_S_MIN)
        assert part.batch_exists(make_keys(1), deadline=soon()) == 0
    wait_for(lambda: bool(part.parts), lambda: part.batch_exists(make_keys(1), deadline=soon()))
    part.close()


def test_a_part_that_comes_after_the_close_is_closed_again() -> None:
    opening, may_open = threading.Event(), threading.Event()
    REFUSING.set()

    def slow_open() -> StorageBackend:
        if not REFUSING.is_set():
            opening.set()
            may_open.wait(30.0)
        return open_switched(CODEC)

    part = LatePart(CODEC, "late", slow_open)
    REFUSING.clear()
    assert opening.wait(30.0)
    part.close()
    may_open.set()
    wait_for(lambda: bool(OPENED) and OPENED[0].closes == 1)
    assert part.parts == []


def test_a_part_whose_opening_goes_wrong_for_good_is_counted_and_fails_visibly() -> None:
    REFUSING.set()

    def broken_open() -> StorageBackend:
        if REFUSING.is_set():
            raise BackendUnavailable("not yet")
        raise RuntimeError("a bug")

    part = LatePart(CODEC, "late", broken_open)
    REFUSING.clear()
    wait_for(lambda: part.statistics().errors.get("internal") == 1)
    assert part.batch_exists(make_keys(1), deadline=soon()) == 0
    assert part.statistics().errors == {"internal": 1, "not_open": 1}
    part.close()


@pytest.mark.parametrize("wrapper", [LevelsBackend, MirrorBackend, ShardedBackend, LatePart])
def test_every_composition_answers_for_every_name_itself(wrapper: type[StorageBackend]) -> None:
    for name in StorageBackend.__abstractmethods__:
        assert getattr(wrapper, name) is not getattr(StorageBackend, name), name
        assert inspect.signature(getattr(wrapper, name)) == inspect.signature(getattr(StorageBackend, name)), name


def test_memory_and_compositions_have_no_raw_store_and_say_so() -> None:
    for spec in (BackendSpec("memory"), BackendSpec("levels", {"levels": [MEMORY, MEMORY]})):
        with pytest.raises(ConfigError, match=f"{spec.type}: cannot be listed; file, .* can"):
            open_raw(spec)


@pytest.mark.parametrize("name", ["levels", "mirror", "sharded"])
def test_a_closed_composition_leaves_no_thread_and_no_descriptor(name: str, tmp_path: Path) -> None:
    parts = [{"type": "file", "name": part, "options": {"path": str(tmp_path / part)}} for part in ("a", "b")]
    entry = "levels" if name == "levels" else "parts"
    before = set(threading.enumerate()), open_descriptors()
    backend = open_backend(name, CODEC, {entry: parts})
    store = Store(backend, lambda key: None, lambda key, data: None)
    assert store_chain(store, make_keys(8)) == [STORED] * 8
    assert load(store, make_keys(8)) == [HIT] * 8
    backend.close()
    assert (set(threading.enumerate()), open_descriptors()) == before

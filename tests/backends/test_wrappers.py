"""A backend that wraps others overrides every verb: an inherited verb would not reach the wrapped backend.

To add a wrapper, add its class to `WRAPPERS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from hicache.backends.base import StorageBackend
from hicache.backends.compose import LevelsBackend, Part
from hicache.backends.compose.sharded import ShardCodec, ShardedBackend
from hicache.backends.envelope import Envelope
from hicache.backends.faults import FaultyBackend
from hicache.backends.guard import GuardedBackend
from hicache.backends.limit import LimitedBackend
from hicache.backends.memory import MemoryBackend
from hicache.backends.raw import RawStore
from hicache.backends.testing import (
    GET_ERROR,
    NAMESPACE,
    PAYLOAD_BYTES,
    SET_ERROR,
    empty_frames,
    full_frames,
    make_keys,
    soon,
)
from hicache.errors import BackendUnavailable
from hicache.frame import FrameCodec

WRAPPERS: list[type[StorageBackend]] = [FaultyBackend, GuardedBackend, LimitedBackend]
VERBS = sorted(StorageBackend.__abstractmethods__)
CODEC = ShardCodec(FrameCodec(NAMESPACE, PAYLOAD_BYTES))
COPIES = 64 * CODEC.frame_bytes


def two() -> list[Part]:
    return [Part(name, MemoryBackend(CODEC)) for name in ("one", "other")]


def no_raw() -> RawStore:
    raise BackendUnavailable("not to be listed")


OPENERS: dict[str, Callable[[], StorageBackend]] = {
    "memory": lambda: MemoryBackend(CODEC),
    "faulty": lambda: FaultyBackend(MemoryBackend(CODEC)),
    "guarded": lambda: GuardedBackend(MemoryBackend(CODEC)),
    "limited": lambda: LimitedBackend(MemoryBackend(CODEC), no_raw, capacity_bytes=1 << 20),
    "levels": lambda: LevelsBackend(CODEC, two(), cascade_bytes_max=COPIES),
    "sharded": lambda: ShardedBackend(CODEC, two()),
}


def inherited(wrapper: type) -> list[str]:
    """Return the names of the contract that `wrapper` does not define in its own package."""
    own = [base for base in wrapper.__mro__ if base is not StorageBackend]
    return [name for name in VERBS if not any(name in vars(base) for base in own)]


def test_the_contract_has_the_verbs() -> None:
    assert {"batch_exists", "batch_get", "batch_set", "delete", "usage", "statistics", "close"} <= set(VERBS)
    others = [name for name in vars(StorageBackend) if not name.startswith("_") and name not in VERBS]
    assert others == [], "these functions are not abstract and would be inherited silently"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper_overrides_every_name(wrapper: type[StorageBackend]) -> None:
    assert inherited(wrapper) == []
    for name in VERBS:
        assert inspect.signature(getattr(wrapper, name)) == inspect.signature(getattr(StorageBackend, name)), name


def test_functions_called_by_an_envelope_are_not_inherited_silently() -> None:
    abstract = {"prefix", "has", "get", "put", "remove", "remove_all", "measure", "shut"}
    assert Envelope.__abstractmethods__ == abstract
    own = {name for name, value in vars(Envelope).items() if callable(value) and not name.startswith("_")}
    assert own == abstract | set(VERBS) | {"count"}


@pytest.mark.parametrize("opener", OPENERS)
def test_after_close_each_call_fails_identically_and_is_counted(opener: str) -> None:
    backend, keys = OPENERS[opener](), make_keys(3)
    backend.close()
    backend.close()
    errors = backend.statistics().errors

    def new_errors() -> int:
        nonlocal errors
        before, errors = errors, backend.statistics().errors
        changed = {name: errors[name] - before.get(name, 0) for name in errors if errors[name] != before.get(name, 0)}
        assert set(changed) == {"closed"}
        return changed["closed"]

    assert (backend.batch_exists(keys, deadline=soon()), new_errors()) == (0, 1)
    assert (backend.batch_has(keys, deadline=soon()), new_errors()) == ([False] * 3, 1)
    frames = empty_frames(CODEC, 3)
    assert (backend.batch_get(keys, frames, deadline=soon()), new_errors()) == ([GET_ERROR] * 3, 3)
    frames = full_frames(CODEC, keys)
    outcomes = backend.batch_set(keys, frames, parent=None, deadline=soon())
    assert (outcomes, new_errors()) == ([SET_ERROR] * 3, 3)
    assert (backend.delete(keys, deadline=soon()), new_errors()) == (0, 1)
    assert (backend.clear(deadline=soon()), new_errors()) == (0, 1)
    found = backend.statistics()
    assert (found.gets[GET_ERROR], found.sets[SET_ERROR]) == (3, 3)
    assert backend.usage().pages == 0


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper_names_its_parts(wrapper: type[StorageBackend]) -> None:
    assert isinstance(inspect.getattr_static(wrapper, "parts"), property), "what a Composite has"


def test_a_name_that_is_not_overridden_is_detected() -> None:
    class Forgetful(StorageBackend):
        def batch_exists(self, keys: object, *, deadline: float) -> int:
            return 0

    assert inherited(Forgetful) == [name for name in VERBS if name != "batch_exists"]

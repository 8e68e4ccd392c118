"""The stores in a tree of backends: their guards, their names and their statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..base import BackendStatistics, Composite, StorageBackend, Usage
from .admission import GuardStatistics
from .backend import GuardedBackend
from .calls import Direction
from .health import IDLE, NOT_OPEN, HealthState, StoreHealth, problem


@dataclass(frozen=True, slots=True)
class LeafStatistics:
    """Statistics of one store. `name` is unique in its tree. `usage` is None until it is known; `guard` is None for a
    store without a guard, whose health is IDLE, and for storage that is not open."""

    name: str
    statistics: BackendStatistics
    usage: Usage | None
    guard: GuardStatistics | None
    health: StoreHealth = IDLE


def unopened(name: str, since_s: float, detail: str) -> LeafStatistics:
    """Return the statistics of storage that is wanted and not open since `since_s` (wall clock), with the reason."""
    health = problem(HealthState.KEEPS_NOTHING, since_s, NOT_OPEN, detail=detail)
    return LeafStatistics(name, BackendStatistics({}, {}, {}, {}, 0, 0, 0), None, None, health)


def guards_of(backend: StorageBackend) -> Iterator[GuardedBackend]:
    """Yield all guards in `backend`: itself, or those among its parts."""
    if isinstance(backend, GuardedBackend):
        yield backend
    elif isinstance(backend, Composite):
        for part in backend.parts:
            yield from guards_of(part)


def may_pass(backend: StorageBackend, direction: Direction) -> bool:
    """True if at least one store in `backend` would be called now. Does not block; a scheduler calls it each step."""
    if isinstance(backend, GuardedBackend):
        return backend.may_pass(direction)
    # `isinstance` of a protocol would take 8 us.
    parts: Sequence[StorageBackend] | None = getattr(backend, "parts", None)
    return parts is None or any(may_pass(part, direction) for part in parts)


def leaf_statistics(backend: StorageBackend) -> tuple[LeafStatistics, ...]:
    """Return the statistics of each store, in the order in which they are read, named as by `named_leaves`.

    Does not block for a guarded store. The usage of a store without a guard is measured now, which may block.
    """
    found: list[LeafStatistics] = []
    for name, leaf in named_leaves(backend):
        if isinstance(leaf, GuardedBackend):
            usage = leaf.usage_sample()
            found.append(LeafStatistics(name, leaf.statistics(), usage, leaf.guard_statistics(), leaf.health()))
        else:
            found.append(LeafStatistics(name, leaf.statistics(), leaf.usage(), None))
    return tuple(found)


def named_leaves(backend: StorageBackend) -> list[tuple[str, StorageBackend]]:
    """Return the name and backend of each store, in the order in which they are read. The backend is the store's guard
    if it has one. The second store of a name is called `name-2`."""
    return list(zip(unique_names([name for name, _ in _leaves(backend)]), [leaf for _, leaf in _leaves(backend)],
                    strict=True))  # fmt: skip


def unique_names(names: Sequence[str]) -> list[str]:
    """Return `names` made unique: the second occurrence of a name gets the suffix `-2`."""
    found: dict[str, None] = {}
    seen: Counter[str] = Counter()
    for name in names:
        unique = name
        while unique in found:
            seen[name] += 1
            unique = f"{name}-{seen[name] + 1}"
        found[unique] = None
    return list(found)


def _leaves(backend: StorageBackend) -> Iterator[tuple[str, StorageBackend]]:
    if isinstance(backend, GuardedBackend):
        yield backend.name, backend
    elif isinstance(backend, Composite):
        found = [leaf for part in backend.parts for leaf in _leaves(part)]
        if len(backend.parts) == len(found) == 1 and not isinstance(found[0][1], GuardedBackend):
            # A wrapper without a guard, such as a limit, has counters that include those of its part.
            found = [(found[0][0], backend)]
        yield from found
    else:
        yield type(backend).__name__.removesuffix("Backend").lower(), backend

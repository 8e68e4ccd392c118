"""A tree of backends as its guards see it: what passes, and what each leaf counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..base import BackendStatistics, Composite, StorageBackend, Usage
from .backend import GuardedBackend
from .options import Direction
from .traffic import GuardStatistics


@dataclass(frozen=True, slots=True)
class LeafStatistics:
    """What one store shows. `name` is unique in its tree; `usage` is None as long as it is not known, `guard` for a
    store without one."""

    name: str
    statistics: BackendStatistics
    usage: Usage | None
    guard: GuardStatistics | None


def guards_of(backend: StorageBackend) -> Iterator[GuardedBackend]:
    """All guards in `backend`: itself, or those among its parts."""
    if isinstance(backend, GuardedBackend):
        yield backend
    elif isinstance(backend, Composite):
        for part in backend.parts:
            yield from guards_of(part)


def may_pass(backend: StorageBackend, direction: Direction) -> bool:
    """Whether some store in `backend` would be asked now. Does not block; for each step of a scheduler."""
    if isinstance(backend, GuardedBackend):
        return backend.may_pass(direction)
    if isinstance(backend, Composite):
        return any(may_pass(part, direction) for part in backend.parts)
    return True


def leaf_statistics(backend: StorageBackend) -> tuple[LeafStatistics, ...]:
    """What each store counts, in the order in which they are read; the second of a name is called `name-2`.

    Does not block for a store behind a guard; one without is asked for its usage.
    """
    found: list[LeafStatistics] = []
    names: set[str] = set()
    for name, leaf in _leaves(backend):
        number, unique = 1, name
        while unique in names:
            number += 1
            unique = f"{name}-{number}"
        names.add(unique)
        if isinstance(leaf, GuardedBackend):
            found.append(LeafStatistics(unique, leaf.statistics(), leaf.usage_sample(), leaf.guard_statistics()))
        else:
            found.append(LeafStatistics(unique, leaf.statistics(), leaf.usage(), None))
    return tuple(found)


def _leaves(backend: StorageBackend) -> Iterator[tuple[str, StorageBackend]]:
    if isinstance(backend, GuardedBackend):
        yield backend.name, backend
    elif isinstance(backend, Composite):
        found = [leaf for part in backend.parts for leaf in _leaves(part)]
        if len(backend.parts) == len(found) == 1 and not isinstance(found[0][1], GuardedBackend):
            # A wrapper without a guard, such as a limit, counts what it does besides what is below it.
            found = [(found[0][0], backend)]
        yield from found
    else:
        yield type(backend).__name__.removesuffix("Backend").lower(), backend

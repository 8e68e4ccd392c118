"""The search for the end of a stored prefix, for stores in which each lookup costs a round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .driver import Driver

# Up to this many keys, `stored_prefix` looks up all keys in parallel, and the answer is exact.
EXACT_KEYS_MAX = 16
# Keys requested in the first round of a longer batch, including both ends. If all or none exist, one round is enough.
FIRST_PROBES = 8
# Keys requested in each further round, which reduces the range to a fifth.
PROBES = 4


def stored_prefix(count: int, ask: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """Return the length of the stored prefix of `count` keys. `ask` returns for some positions whether each is stored.

    Pages of a chain are written head first and evicted tail first, so the stored pages are nearly always a prefix. This
    function searches for its end. Each round looks up a few keys in parallel and costs one round trip.

    Exact for up to EXACT_KEYS_MAX keys. For more keys, exact if the stored keys are a prefix; otherwise a hole between
    the requested keys is not seen.
    """
    if count <= EXACT_KEYS_MAX:
        found = ask(range(count))
        return next((position for position, there in enumerate(found) if not there), count)
    low, high = 0, count  # all requested keys below `low` are stored; `high` is not stored, or is the end
    probes = _spread(-1, count, FIRST_PROBES, ends=True)
    while probes:
        for position, there in zip(probes, ask(probes), strict=True):
            if not there:
                high = position
                break
            low = position + 1
        probes = _spread(low - 1, high, PROBES, ends=False)
    return high


def search_prefix(
    driver: Driver[Any], namespace: bytes, keys: Sequence[bytes], deadline: float
) -> tuple[int, Sequence[str]]:
    """See FindsPrefixes: `stored_prefix` with lookups of `driver`, which makes those of one call in parallel."""
    kinds: list[str] = []

    def ask(positions: Sequence[int]) -> list[bool]:
        answers = [*driver.find(namespace, [keys[position] for position in positions], deadline)]
        kinds.extend(answer for answer in answers if isinstance(answer, str))
        return [answer is True for answer in answers]

    return stored_prefix(len(keys), ask), kinds


def _spread(low: int, high: int, count: int, *, ends: bool) -> list[int]:
    """Return up to `count` evenly spread positions between `low` and `high`, both excluded. With `ends`, include the
    outermost of them."""
    first, last = low + 1, high - 1
    if last - first + 1 <= count:
        return list(range(first, last + 1))
    if ends:
        return [first + (last - first) * i // (count - 1) for i in range(count)]
    return [low + (high - low) * i // (count + 1) for i in range(1, count + 1)]

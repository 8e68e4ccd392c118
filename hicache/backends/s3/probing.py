"""How long a prefix of a batch is stored, in few requests.

Pages of a chain are written head first and evicted tail first, so what is stored is nearly always a prefix, and its end
can be searched for. Each round asks for a few keys at once, because a round costs one round trip however many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Batches up to this length are asked for key by key, all at once, and the answer is exact.
EXACT_KEYS_MAX = 16
# Keys asked for in the first round of a longer batch, ends included. With all or none of them there it is the only one.
FIRST_PROBES = 8
# Keys asked for in each further round, which leaves a fifth of the range.
PROBES = 4


def stored_prefix(count: int, ask: Callable[[Sequence[int]], Sequence[bool]]) -> int:
    """The length of the prefix of `count` keys that is stored. `ask` says of some positions whether each is there.

    Exact up to EXACT_KEYS_MAX keys. Beyond that exact if no key is missing in front of one that is stored; where that
    does not hold, a hole between the keys that were asked for is not seen.
    """
    if count <= EXACT_KEYS_MAX:
        found = ask(range(count))
        return next((position for position, there in enumerate(found) if not there), count)
    low, high = 0, count  # all asked for below `low` are there, `high` is not, or the end
    probes = _spread(-1, count, FIRST_PROBES, ends=True)
    while probes:
        for position, there in zip(probes, ask(probes), strict=True):
            if not there:
                high = position
                break
            low = position + 1
        probes = _spread(low - 1, high, PROBES, ends=False)
    return high


def _spread(low: int, high: int, count: int, *, ends: bool) -> list[int]:
    """Up to `count` positions evenly between `low` and `high`, which are left out; with `ends` the outermost ones."""
    first, last = low + 1, high - 1
    if last - first + 1 <= count:
        return list(range(first, last + 1))
    if ends:
        return [first + (last - first) * i // (count - 1) for i in range(count)]
    return [low + (high - low) * i // (count + 1) for i in range(1, count + 1)]

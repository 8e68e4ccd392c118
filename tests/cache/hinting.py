"""Hints for the caches of the tests, and what they have left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hicache.cache.tiered import TieredCache
from hicache.hints import Outcome
from hicache.keys import RadixKey


def action(kind: str, **payload: Any) -> dict[str, Any]:
    """Return an action as JSON."""
    return {"action_id": f"id of {kind}", "action_type": kind, "payload": payload}


def send(cache: TieredCache, kind: str, rid: str | None = None, **payload: Any) -> Outcome:
    """Send one action, alone or for the request `rid`, and return its outcome."""
    (found,) = cache.hint({"actions": [action(kind, **payload)]}, rid)
    assert (found.action_id, found.action_type) == (f"id of {kind}", kind)
    assert found.detail or found.status == "accepted"
    return found


def tokens(key: RadixKey) -> list[int]:
    """Return the token ids of a prompt, for a payload."""
    ids: list[int] = np.frombuffer(key.tokens, dtype="<u4").tolist()
    return ids


def counted(cache: TieredCache, kind: str) -> dict[str, int]:
    """Return how often actions of a kind ended how."""
    return {status: count for (one, status), count in cache.statistics().hints.items() if one == kind}


def bounds(cache: TieredCache) -> Sequence[int]:
    """Return the sizes of all that hints keep: sessions, key bytes, requests, sources, timers, fetches."""
    hints = cache._hints
    return (
        len(hints._sessions), hints._key_bytes, len(hints._requests), len(hints._records), len(hints._timers._heap),
        len(hints._fetches),
    )


def require_nothing_left(cache: TieredCache) -> None:
    """Assert that no hint applies any more. REQUIRES: their times are over."""
    hints = cache._hints
    assert hints._retained_pages == cache.tree.pinned_pages == len(hints._timers) == len(hints._fetches) == 0
    assert not hints._requests
    assert not any(one.retained or one.wait or any(pin.active for pin in one.pins) for one in hints._sessions.values())
    assert not any(node.hint is not None and node.hint.value > 0 for node in cache.tree.nodes())

"""The shell around a driver is small: how many functions run in one call of a store in memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import hicache.backends
from hicache.backends.memory import MemoryDriver
from hicache.backends.store import Store
from hicache.frame import FrameCodec
from hicache_lab.conformance import HIT, NAMESPACE, PAYLOAD_BYTES, empty_frames, full_frames, make_keys, soon

PAGES = 8
_FOLDER = str(Path(hicache.backends.__file__).parent)


def calls_of(work: Callable[[], object]) -> Counter[str]:
    """Return how often each function of hicache/backends is called, comprehensions and steps of generators included."""
    found: Counter[str] = Counter()

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_FOLDER):
            found[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


# Three for each page, and the rest once per call.
@pytest.mark.parametrize(("verb", "most"), [("get", 60), ("set", 62), ("exists", 28)])
def test_a_call_of_eight_pages_takes_few_function_calls(verb: str, most: int) -> None:
    codec, keys = FrameCodec(NAMESPACE, PAYLOAD_BYTES), make_keys(PAGES)
    store, frames, deadline = Store(MemoryDriver(), codec), empty_frames(codec, PAGES), soon()
    store.batch_set(keys, full_frames(codec, keys), parent=None, deadline=deadline)
    assert store.batch_get(keys, frames, deadline=deadline) == [HIT] * PAGES  # the first one reads in two parts
    work: dict[str, Callable[[], object]] = {
        "get": lambda: store.batch_get(keys, frames, deadline=deadline),
        "set": lambda: store.batch_set(keys, frames, parent=None, deadline=deadline),
        "exists": lambda: store.batch_exists(keys, deadline=deadline),
    }
    found = calls_of(work[verb])
    assert found.total() <= most, found.most_common()
    store.close()

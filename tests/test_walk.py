"""The walk through the code in CONTRIBUTING.md is the way of a page: a page goes it, from L1 to a file and back."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import hicache
from hicache import HiCacheConfig, HiRadixCache, KVGeometry, Namespace, RadixKey, create_cache
from tests.waiting import wait_for

PACKAGE = Path(hicache.__file__).parent
FILES_MAX = 40
KEY = RadixKey.of(range(320))


def walk(repository: Path) -> list[str]:
    page = (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## A first walk through the code\n")[2].partition("\n## ")[0]
    return re.findall(r"`([a-z_/]+\.py)`", section)


@contextmanager
def used_files() -> Iterator[set[str]]:
    """Yield a set that gets the files of the package whose functions run, on new threads too."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            found.add(frame.f_code.co_filename.removeprefix(f"{PACKAGE}/"))

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def serve(cache: HiRadixCache, rid: str) -> int:
    """Serve the prompt. Return how many of its tokens were cached."""

    def prefetched() -> bool:
        cache.poll()
        return cache.check_prefetch_progress(rid)

    cache.prefetch_from_storage(rid, KEY)
    wait_for(prefetched)
    request = cache.begin_request(rid, KEY)
    assert request is not None
    cached, transfer = request.cached_tokens, cache.start_loading()
    if transfer is not None:
        transfer.wait_layer(1)
    cache.cache_finished_req(request, KEY)
    return cached


def test_a_page_goes_the_way_that_the_walk_describes(repository: Path, tmp_path: Path) -> None:
    namespace = Namespace("weights", KVGeometry(layers=2, heads=1, head_dim=8, page_size=16))
    config = HiCacheConfig.model_validate({
        "page_size": 16, "device": {"tokens": 512}, "host": {"tokens": 1024}, "break_even": {"mode": "always"},
        "storage": {"type": "file", "options": {"path": tmp_path, "capacity": "64MiB", "free_space_floor": 0}},
    })
    cached = []
    with used_files() as used:
        for rid in ("first", "second"):
            with create_cache(config, namespace) as cache:
                assert isinstance(cache, HiRadixCache)
                cached.append(serve(cache, rid))  # the end of the block stores its pages
    files = walk(repository)
    assert cached == [0, 304]
    assert 30 <= len(files) == len(set(files)) <= FILES_MAX
    assert not set(files) - used

"""`host.shared.keep`: the L2 of a killed engine stays, and the next engine uses the pages that it can verify."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hicache.backends.base import BackendStatistics, Direction, GetOutcome, SetOutcome
from hicache.backends.guard import Override
from hicache.backends.kept import KeptFrames, open_kept
from hicache.backends.memory import MemoryDriver
from hicache.backends.store import Store
from hicache.config import HiCacheConfig
from hicache.keys import Namespace, RadixKey
from hicache.shared_memory import CONTROL_BYTES, path_of
from tests.cache.keeping import KINDS, PAGES, PROMPTS, Engine, RadixEngine, options
from tests.cache.world import GEOMETRY, NAMESPACE, codec, prompt
from tests.waiting import wait_for

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
KEY = "01" * 32
FRAME_BYTES = codec().frame_bytes
both = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"test-keep-{os.getpid()}"
    yield chosen
    path_of(chosen).unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_MAC", KEY)
    monkeypatch.setenv("OTHER_MAC", "02" * 32)
    monkeypatch.setenv("BOTH_MACS", "02" * 32 + " " + KEY)


@functools.cache
def memory_of_killed(kind: str, sections: str) -> bytes:
    """Run an engine over PROMPTS, kill it, and return the content of its memory."""
    name = f"test-kept-{os.getpid()}"
    config = json.dumps(options(name, **json.loads(sections)))
    command = [sys.executable, "-m", "tests.cache.keeping", kind, config]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "ready\n"
        finally:
            child.send_signal(signal.SIGKILL)
    memory = path_of(name).read_bytes()
    path_of(name).unlink()
    return memory


def killed(kind: str, name: str, **sections: Any) -> None:
    """Create the memory of an engine that has served PROMPTS and was killed."""
    memory = memory_of_killed(kind, json.dumps(sections))
    path_of(name).touch(0o600)
    path_of(name).write_bytes(memory)


@contextmanager
def started(
    kind: str, name: str, namespace: Namespace = NAMESPACE, **sections: Any
) -> Iterator[Engine]:
    """Run the next engine under `name`."""
    engine = KINDS[kind](HiCacheConfig.model_validate(options(name, **sections)), namespace)
    with closing(engine.cache):
        yield engine
    del engine.cache
    gc.collect()  # unmaps the memory, like the end of a process


def kept_statistics(engine: Engine) -> BackendStatistics:
    (kept,) = [leaf for leaf in engine.cache.statistics().controller.backends if leaf.name == "kept"]
    return kept.statistics


def served(engine: Engine) -> list[int]:
    """Serve PROMPTS; return how many pages of each came from the cache. Assert that they had the right bytes."""
    found = []
    for key in PROMPTS:
        found.append(engine.serve(key))
        engine.settle()
    assert engine.wrong == 0
    return found


def flip(name: str, key: RadixKey, page: int, at: int) -> None:
    """Change a bit of a frame in the memory of a killed engine."""
    page_key = key.page_keys(GEOMETRY.page_size, b"", 0, page + 1)[page]
    data = bytearray(path_of(name).read_bytes())
    (place,) = [at for at in range(CONTROL_BYTES, len(data), FRAME_BYTES) if data[at + 56 : at + 88] == page_key]
    data[place + at] ^= 8
    path_of(name).write_bytes(data)


@both
def test_an_engine_without_storage_finds_the_pages_of_a_killed_one(kind: str, name: str) -> None:
    killed(kind, name)
    with started(kind, name) as engine:
        assert served(engine) == [5, 5, 5]
        assert engine.cache.statistics().hit_tokens["storage"] == PAGES * GEOMETRY.page_size
        assert kept_statistics(engine).gets[GetOutcome.HIT] == PAGES
        assert served(engine) == [5, 5, 5]  # from L1 or L2 now
    with started(kind, name) as engine:  # the engine before was closed
        assert served(engine) == [5, 5, 5]
    path_of(name).unlink()
    with started(kind, name) as engine:
        assert served(engine) == [0, 0, 0]


@both
def test_without_keep_an_engine_finds_no_pages_and_removes_its_memory(kind: str, name: str) -> None:
    killed(kind, name)
    with started(kind, name, keep=False) as engine:
        assert served(engine) == [0, 0, 0]
    assert not path_of(name).exists()


@pytest.mark.parametrize("at", [60, 130, 190, 256, 256 + GEOMETRY.payload_bytes - 1])
def test_a_changed_page_is_computed_again(name: str, at: int) -> None:
    killed("radix", name)
    flip(name, PROMPTS[1], 2, at)
    with started("radix", name) as engine:
        assert served(engine) == [5, 2, 5]
        # A frame with another page or namespace in its header is not read.
        assert kept_statistics(engine).corrupt == ({} if at in (60, 130) else {"tag": 1})


@pytest.mark.parametrize("field", [{"model": "another"}, {"weights_epoch": 1}, {"tp_size": 2}])
def test_the_pages_of_another_namespace_are_free(name: str, field: dict[str, Any]) -> None:
    killed("radix", name)
    with started("radix", name, dataclasses.replace(NAMESPACE, **field)) as engine:
        assert engine.cache.host.allocator.used_pages == 0
        assert served(engine) == [0, 0, 0]


def test_only_pages_with_the_tag_of_a_configured_mac_key_are_used(name: str) -> None:
    signed = {"mac_key_env": "TEST_MAC"}
    for written, section, hits in (
        ({}, signed, 0),
        (signed, {}, 0),
        (signed, {"mac_key_env": "OTHER_MAC"}, 0),
        (signed, {"mac_key_env": "BOTH_MACS"}, 5),
        (signed, signed, 5),
    ):
        killed("radix", name, integrity=written)
        with started("radix", name, integrity=section) as engine:
            assert served(engine) == [hits] * 3, section


def test_new_pages_replace_kept_ones_oldest_first(name: str) -> None:
    killed("radix", name, host_pages=16)
    with started("radix", name, host_pages=16) as engine:
        assert engine.cache.host.allocator.used_pages == PAGES  # the incomplete write counts as free
        assert engine.serve(PROMPTS[1]) == 5  # its copies need the room of four other pages
        engine.settle()
        for first in (50, 60):
            assert engine.serve(prompt(*range(first, first + 5))) == 0
            engine.settle()
        assert engine.serve(PROMPTS[1]) == 5
        assert engine.wrong == 0
        engine.settle()
        assert engine.serve(PROMPTS[0]) < 5


def test_a_prompt_that_does_not_fit_on_l2_frees_no_kept_page(name: str) -> None:
    killed("radix", name, host_pages=16)
    with started("radix", name, host_pages=16) as engine:
        assert engine.cache._l2.reserve(17) is None
        assert engine.cache.host.allocator.used_pages == PAGES
        assert engine.serve(PROMPTS[2]) == 5


@both
def test_clear_and_new_weights_drop_kept_pages(kind: str, name: str) -> None:
    killed(kind, name)
    with started(kind, name) as engine:
        engine.cache.clear()
        assert served(engine) == [0, 0, 0]
    with started(kind, name) as engine:
        engine.cache.update_weights(1)
        wait_for(lambda: engine.cache.controller.gate.storage is not None, engine.step)
        assert served(engine) == [0, 0, 0]
    with started(kind, name, dataclasses.replace(NAMESPACE, weights_epoch=1)) as engine:
        assert served(engine) == [5, 5, 5]


def remove(engine: Engine, *, removes_all: bool) -> int:
    """Remove the kept pages of all prompts, or of the first one. Return their number."""
    backend, deadline = engine.cache.controller.backend, time.monotonic() + 30
    assert backend is not None
    keys = PROMPTS[0].page_keys(GEOMETRY.page_size, b"", 0, 5)
    return backend.clear(deadline=deadline) if removes_all else backend.delete(keys, deadline=deadline)


@pytest.mark.parametrize("removes_all", [False, True])
def test_pages_that_were_removed_are_not_found_by_the_next_process(name: str, removes_all: bool) -> None:
    killed("radix", name)
    with started("radix", name) as engine:
        assert remove(engine, removes_all=removes_all) == (PAGES if removes_all else 5)
    with started("radix", name) as engine:
        assert served(engine) == ([0, 0, 0] if removes_all else [0, 5, 5])


@both
def test_storage_serves_pages_that_were_not_kept_and_gets_missing_ones(kind: str, name: str, tmp_path: Path) -> None:
    storage = {"type": "file", "options": {"path": str(tmp_path), "capacity": "1MiB"}}
    killed(kind, name, storage=storage)
    flip(name, PROMPTS[0], 1, 300)
    lost = PROMPTS[2].page_keys(GEOMETRY.page_size, b"", 0, 5)[4]
    (path,) = tmp_path.rglob(f"{lost.hex()}*")
    path.unlink()
    with started(kind, name, storage=storage) as engine:
        assert served(engine) == [5, 5, 5]
        assert kept_statistics(engine).gets[GetOutcome.HIT] == PAGES - 1
        assert SetOutcome.REJECTED not in {o for o, n in kept_statistics(engine).sets.items() if n}
    assert path.exists()  # the page was kept, and storage lacked it
    path_of(name).unlink()
    with started(kind, name, storage=storage) as engine:
        assert served(engine) == [5, 5, 5]


def test_with_kept_frames_the_guard_of_storage_decides_whether_it_is_used() -> None:
    store = Store(MemoryDriver(), codec())
    frames = KeptFrames(codec(), 0, lambda page: memoryview(b""))
    with closing(open_kept(codec(), frames, store)) as storage:
        for direction in Direction:
            assert storage.may_pass(direction)
            store.override(direction, Override.OFF)
            assert not storage.may_pass(direction)


@pytest.mark.parametrize("has_storage", [False, True])
def test_a_page_without_a_frame_counts_as_stored_only_in_storage(name: str, tmp_path: Path, has_storage: bool) -> None:
    storage = {"type": "file", "options": {"path": str(tmp_path), "capacity": "1MiB"}}
    with started("radix", name, storage=storage if has_storage else None) as engine:
        assert isinstance(engine, RadixEngine)
        engine.serve(PROMPTS[0])
        engine.settle()
        tree = engine.cache.tree
        for node in tree.nodes():
            assert node.stored
            engine.cache.host.free(tree.leave_host(node))
            assert node.stored is has_storage
        engine.serve(PROMPTS[0])  # does not copy the pages to L2 again only to seal them
        engine.settle()
        assert tree.host_pages == 0
        engine.cache.evict(100)
        engine.settle()
        # Pages in storage can be evicted at once; other pages are written back first.
        assert engine.cache.peek(PROMPTS[0]).host_pages == (0 if has_storage else 5)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"host": {"tokens": 128, "shared": {"keep": True}}}, "needs host.shared.name"),
        ({"storage_format": {"compression": "zstd"}}, "compressed or encrypted"),
        ({"storage_format": {"encryption_key_env": "TEST_MAC"}}, "compressed or encrypted"),
        ({"integrity": {"tag": "none"}}, "tag none cannot be verified"),
        ({"host": {"tokens": 128, "shared": {"name": "a", "keep": True, "owner": "daemon"}}}, "use owner engine"),
    ],
)
def test_options_that_do_not_allow_keep_are_rejected(sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        HiCacheConfig.model_validate({**options("a"), **sections})

"""Spans of the requests of a cache."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from hicache import tracing
from hicache.backends.base import GetOutcome
from hicache.backends.calls import Call
from hicache.backends.compose.composed import Part as NamedPart
from hicache.backends.compose.sharded import ShardCodec, Shards
from hicache.backends.opening import StorageOpener
from hicache.backends.storage import Storage
from hicache.cache import create_host_cache
from hicache.cache.explain import RECENT_MAX, Explainer, PromptTokens
from hicache.cache.statistics import CacheCounters
from hicache.config import HiCacheConfig, HostConfig
from hicache.config.publishing import TracingConfig
from hicache.errors import BackendError, InvalidInput
from hicache.frame import PageBuffer
from hicache.ghosts import Reason
from hicache.keys import RadixKey
from tests.cache.host_world import HostWorld
from tests.cache.world import (
    NAMESPACE,
    GatedBackend,
    LastingBackend,
    ShiftedClock,
    World,
    codec,
    every_hit,
    filled,
    memory_backend,
    prefetch,
    prompt,
)
from tests.spans import HEADERS, PARENT_ID, TRACE_ID, Spans, attributes_of, parent_of, trace_of

KEY = prompt(1, 2, 3)
LONGER = prompt(1, 2, 3, 4)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    return Spans(monkeypatch)


AnyBackend = TypeVar("AnyBackend", bound=LastingBackend)


def stored(spans: Spans, backend: AnyBackend, key: RadixKey = KEY) -> AnyBackend:
    """Store the pages of `key` in `backend`, and forget the spans of that."""
    filled(backend, key)
    spans.check()
    spans.ended.clear()
    return backend


def levels(folder: Path) -> Storage:
    """Open a store with the levels memory and file; the file level is in `folder`."""
    parts = [{"type": "memory"}, {"type": "file", "options": {"path": str(folder / "store")}}]
    return StorageOpener(HiCacheConfig(storage={"type": "levels", "options": {"levels": parts}})).open(codec())


def test_the_spans_of_a_request_show_which_level_had_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(backend=levels(tmp_path))
    world.serve("first", KEY)
    world.close()
    spans = Spans(monkeypatch)
    world = World(backend=levels(tmp_path))
    assert world.cache.prefetch_from_storage("a", LONGER, trace=HEADERS)
    world.arrive("a")
    world.attempt("a", LONGER)
    world.close()
    spans.check()
    of_request = [span for span in spans.ended if trace_of(span) == TRACE_ID]
    frame_bytes, usage = 3 * codec().frame_bytes, "gen_ai.usage"
    spans.ended = of_request  # the others are copies to the memory level and uses, in the background
    assert spans.trees() == inspect.cleandoc(f"""
        prefetch pages=4 hit_pages=3 outcome=arrived
          lookup pages=4 hit_pages=3
            store.exists store=memory pages=4 bytes=0 hit_pages=0 outcome=good
            store.exists store=file pages=4 bytes=0 hit_pages=3 outcome=good
            store.exists store=memory pages=1 bytes=0 hit_pages=0 outcome=good
          read pages=3 hit_pages=3 bytes={frame_bytes}
            store.get store=memory pages=3 bytes={frame_bytes} hit_pages=0 outcome=good
            store.get store=file pages=3 bytes={frame_bytes} hit_pages=3 outcome=good
        load pages=3 outcome=loaded
        request {usage}.input_tokens=17 {usage}.cache_read.input_tokens=12 {usage}.cache_creation.input_tokens=0 \
computed.new=4 computed.tail=1
    """) + "\n"
    tops = [span for span in of_request if span.name in ("hicache.prefetch", "hicache.load")]
    assert {parent_of(span) for span in tops} == {int(PARENT_ID, 16)}


def test_the_parts_of_a_sharded_store_are_read_in_the_trace_of_the_request(spans: Spans) -> None:
    both = threading.Barrier(2)

    class Part(LastingBackend):
        def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
            both.wait(30)  # so that the parts are read on two threads
            return super()._get(call, keys, pages)

    key, shards = prompt(*range(1, 13)), ShardCodec(codec())
    backend = Shards(shards, [NamedPart(name, Part(shards)) for name in ("a", "b")])
    world = World(device_pages=32, backend=backend)
    world.serve("first", key)
    world.forget()
    assert world.cache.prefetch_from_storage("a", key, trace=HEADERS)
    world.arrive("a")
    world.attempt("a", key)
    world.close()
    reads = [attributes_of(span) for span in spans.ended if span.name == "hicache.store.get"]
    assert len(reads) == 2 and sum(int(str(read["hit_pages"])) for read in reads) == 12
    assert {trace_of(span) for span in spans.ended if span.name == "hicache.store.get"} == {TRACE_ID}
    spans.check()


def test_without_headers_the_current_span_is_the_parent(spans: Spans) -> None:
    world = World(backend=stored(spans, memory_backend()))
    with spans.tracer.start_as_current_span("step"):
        world.prefetch("a", KEY)
    world.attempt("a", KEY)
    world.close()
    step = next(span for span in spans.ended if span.name == "step")
    (found,) = [span for span in spans.ended if span.name == "hicache.prefetch"]
    assert parent_of(found) == step.context.span_id
    spans.check()


def test_invalid_headers_begin_a_trace(spans: Spans) -> None:
    world = World(backend=stored(spans, memory_backend()))
    world.cache.prefetch_from_storage("a", KEY, trace={"traceparent": f"00-{'0' * 32}-{PARENT_ID}-01"})
    world.arrive("a")
    world.cache.abort_prefetch("a")
    assert "hicache.prefetch" in [span.name for span in spans.ended if span.parent is None]


def test_a_trace_of_another_type_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="trace"):
        World().cache.prefetch_from_storage("a", KEY, trace="00-1-2-01")  # type: ignore[arg-type]


def test_the_loads_of_an_engine_with_its_own_device_pages_have_spans(spans: Spans) -> None:
    world = HostWorld(backend=stored(spans, memory_backend()))
    for rid, seconds in (("a", 0.001), ("b", None)):
        world.cache.prefetch(rid, KEY, trace=HEADERS)
        world.until(partial(world.cache.check_prefetch, rid))
        assert world.cache.lookup(rid, KEY).pages == 3
        world.cache.end_load(world.begin_load(rid, KEY, 1, 3), seconds)
        world.cache.abort(rid)
    world.close()
    loads = [span for span in spans.ended if span.name == "hicache.load"]
    assert [(span.parent and span.parent.span_id) for span in loads] == 2 * [int(PARENT_ID, 16)]
    assert spans.named("load") == [{"pages": 2, "outcome": "loaded"}, {"pages": 2, "outcome": "failed"}]
    assert spans.usage() == [(12, 12, 0, {}), (12, 0, 0, {"unavailable": 12})]
    assert {parent_of(span) for span in spans.ended if span.name == "hicache.request"} == {int(PARENT_ID, 16)}
    assert not world.cache._contexts
    spans.check()


# Requests


def test_the_span_of_a_request_has_its_tokens_read_written_and_computed_by_reason(spans: Spans) -> None:
    world = World()
    world.serve("a", KEY)
    world.serve("b", prompt(1, 2, 9, 9))
    world.cache.clear()
    world.serve("c", KEY)
    world.begin("d", KEY)
    assert spans.usage() == [
        (13, 0, 12, {"new": 12, "tail": 1}), (17, 8, 8, {"new": 8, "tail": 1}), (13, 0, 12, {"evicted": 12, "tail": 1}),
    ]
    world.close()
    assert spans.usage()[3] == (13, 12, 0, {"tail": 1}), "the cache was closed before its end"
    spans.check()


def test_details_of_a_reason_add_up_and_tokens_of_outputs_do_not_count(spans: Spans) -> None:
    computed = {(Reason.EVICTED, "host"): 8, (Reason.EVICTED, "cleared"): 4, (Reason.NEW, ""): 0, (Reason.TAIL, ""): 1}
    account = PromptTokens("a", 0.0, 20, device=7, computed=computed, written=99, span=tracing.begin("request"))
    explainer = Explainer(0, CacheCounters(), math.inf)
    explainer.end(account)
    assert spans.usage() == [(20, 7, 13, {"evicted": 12, "tail": 1})]
    explainer.end(account)
    assert len(spans.ended) == 1


def test_a_request_that_is_forgotten_or_begins_again_has_no_open_span(spans: Spans) -> None:
    explainer = Explainer(0, CacheCounters(), math.inf)
    for rid in ("again", "again", *map(str, range(RECENT_MAX))):
        explainer.count(PromptTokens(rid, 0.0, 1, span=tracing.begin("request")))
    assert len(spans.ended) == 2
    for rid in list(explainer.recent):
        explainer.end(explainer.recent[rid])
    spans.check()


# Ends of prefetches


def stuck(backend: GatedBackend, **entries: object) -> World:
    """Return a world in which the read of request "a" hangs until `backend.reads` is set."""
    backend.reads.clear()
    backend.entered.clear()
    world = World(backend=backend, config=every_hit(prefetch=prefetch(**entries)), clock=ShiftedClock())
    assert world.cache.prefetch_from_storage("a", KEY)
    world.until(backend.entered.is_set)
    return world


@pytest.mark.parametrize("how", ["abort", "begin", "clear", "close"])
def test_the_span_of_a_prefetch_that_is_cut_off_ends_at_once(spans: Spans, how: str) -> None:
    backend = stored(spans, GatedBackend())
    world = stuck(backend)
    if how == "abort":
        world.cache.abort_prefetch("a")
    elif how == "begin":
        world.attempt("a", KEY)
    elif how == "clear":
        world.cache.clear()
    if how != "close":
        outcome = "prefetch_timeout" if how == "begin" else "cancelled"
        assert spans.named("prefetch") == [{"pages": 3, "hit_pages": 0, "outcome": outcome}]
    backend.reads.set()
    world.close()
    assert len(spans.named("prefetch")) == 1
    spans.check()


def test_the_span_of_a_late_prefetch_ends_when_its_request_begins(spans: Spans) -> None:
    backend = stored(spans, GatedBackend())
    world = stuck(backend, timeout_base=5.0, timeout_per_1024_tokens=0)
    clock = world.controller.clock
    assert isinstance(clock, ShiftedClock)
    assert not world.cache.check_prefetch_progress("a")
    clock.shift_s = 6.0
    world.arrive("a")
    assert spans.named("prefetch") == []
    world.attempt("a", KEY)
    assert spans.named("prefetch") == [{"pages": 3, "hit_pages": 0, "outcome": "prefetch_timeout"}]
    backend.reads.set()
    world.close()
    spans.check()


def test_the_span_of_a_prefetch_says_why_nothing_was_read(spans: Spans) -> None:
    backend = stored(spans, GatedBackend())
    world = stuck(backend, operations_max=1)
    assert world.cache.prefetch_from_storage("queued", prompt(7, 8))
    world.attempt("queued", prompt(7, 8))
    backend.reads.set()
    world.arrive("a")
    world.attempt("a", KEY)
    world.prefetch("unknown", prompt(9, 9))
    world.attempt("unknown", prompt(9, 9))
    world.close()
    assert [(found["hit_pages"], found["outcome"]) for found in spans.named("prefetch")] == [
        (0, "prefetch_queued"), (3, "arrived"), (0, "prefetch_hit_too_short"),
    ]
    spans.check()


def test_a_request_that_asks_again_has_a_span_for_each_prefetch(spans: Spans) -> None:
    world = World(backend=stored(spans, memory_backend(), LONGER))
    world.prefetch("a", prompt(1, 2))
    world.prefetch("a", LONGER)
    world.attempt("a", LONGER)
    world.close()
    assert [(found["pages"], found["hit_pages"]) for found in spans.named("prefetch")] == [(2, 2), (2, 2)]
    spans.check()


def test_requests_with_the_same_prompt_have_a_span_each(spans: Spans) -> None:
    backend = stored(spans, GatedBackend())
    world = stuck(backend)
    assert world.cache.prefetch_from_storage("b", KEY)
    backend.reads.set()
    world.arrive("a", "b")
    world.attempt("a", KEY)
    world.attempt("b", KEY)
    world.close()
    assert len(spans.named("prefetch")) == 2
    spans.check()


def test_a_cancelled_load_ends_its_span(spans: Spans) -> None:
    world = World()
    world.serve("a", KEY)
    world.leave_l1()
    request = world.admit("b", KEY)
    world.cache.cache_finished_req(request, None)
    assert spans.named("load") == [{"pages": 3, "outcome": "cancelled"}]
    world.close()
    spans.check()


def test_a_store_that_raises_leaves_neither_its_words_nor_an_open_span(spans: Spans) -> None:
    class Raises(LastingBackend):
        def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
            raise BackendError("/a/path of page " + keys[0].hex())

    world = World(backend=stored(spans, Raises(codec())))
    world.prefetch("a", KEY)
    world.attempt("a", KEY)
    world.close()
    assert [found["outcome"] for found in spans.named("prefetch")] == ["prefetch_failed"]
    spans.check()


@pytest.mark.parametrize("enabled", [False, True])
def test_a_cache_without_storage_switches_spans_on(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    monkeypatch.setattr(tracing, "_tracer", None)
    config = every_hit(page_size=4, host=HostConfig(size="1MiB"), tracing=TracingConfig(enabled=enabled))
    create_host_cache(config, NAMESPACE).close()
    assert (tracing._tracer is not None) == enabled


def test_without_tracing_a_request_keeps_no_context() -> None:
    world = World(backend=filled(memory_backend(), KEY))
    assert world.cache.prefetch_from_storage("a", KEY, trace=HEADERS)
    assert world.prefetch_of("a").span is None and not world.cache._contexts
    assert tracing.headers() == {}
    world.arrive("a")

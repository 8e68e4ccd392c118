"""Pins, sessions, KV events, the printed tree and new weights, in one conversation.

    python examples/conversation.py

The program pins a system prompt, serves two turns of a session, evicts all pages from L1, finds their location from
KV events, prints the tree and changes the weights. There is no model: `compute` writes constants as KV.
docs/embedding.md explains each step.
"""

from __future__ import annotations

import time

from hicache import HiCacheConfig, KVGeometry, Namespace, RadixKey
from hicache.cache import RequestKV, SessionCache, create_cache
from hicache.events import EventStream, Medium, PrefixIndex
from hicache.keys import page_keys
from hicache.radix import pretty_print
from hicache.tiers import MHATokenToKVPool, token_slots

PAGE_SIZE = 16
GEOMETRY = KVGeometry(layers=4, heads=2, head_dim=16, page_size=PAGE_SIZE, dtype="float32")
CONFIG = HiCacheConfig.model_validate({
    "page_size": PAGE_SIZE,
    "device": {"tokens": 1024},
    "eviction_policy": "slru",
    "sessions": {"enabled": True},
    "write_policy": "write_through_selective",
})
EVENTS_BYTES = 1 << 20
WAIT_S = 10.0


def compute(cache: SessionCache, request: RequestKV, begin: int, end: int) -> None:
    """Write a constant as KV of the tokens `begin ... end - 1`, into their slots of the pool. Replaces the forward."""
    assert isinstance(cache.device, MHATokenToKVPool)
    slots = token_slots(request.pages, PAGE_SIZE)[begin:end]
    for layer in range(GEOMETRY.layers):
        for part in cache.device.get_kv_buffer(layer):  # [pages + 1, page_size, heads, head_dim]
            part[slots // PAGE_SIZE, slots % PAGE_SIZE] = end


def turn(cache: SessionCache, rid: str, session_id: str | None, prompt: list[int], output: list[int]) -> RadixKey:
    """Serve one request: prefill the missing tokens and decode `output`. Return the key of all tokens that have KV."""
    if session_id is not None:
        cache.join_session(rid, session_id)
    key = RadixKey.of(prompt, cache_salt="alice")
    request = cache.begin_request(rid, key)
    if request is None:
        raise SystemExit("L1 is full; a scheduler would retry in its next step")
    cached = request.cached_tokens
    transfer = cache.start_loading()
    if transfer is not None:
        for layer in range(GEOMETRY.layers):
            transfer.wait_layer(layer)  # a forward waits right before it reads the layer
    begin_s = time.perf_counter()
    compute(cache, request, cached, len(prompt))
    if transfer is None:
        cache.record_prefill(len(prompt) - cached, time.perf_counter() - begin_s)
    cache.cache_unfinished_req(request, key)  # from now on, other requests can hit the prompt
    print(f"{rid}: {len(prompt)} tokens of prompt, {cached} of them cached")
    # The last sampled token has no KV yet: the next turn computes it.
    for count in range(1, len(output)):
        if not cache.extend(request, len(prompt) + count):
            raise SystemExit("L1 is full; a scheduler would end or preempt a request")
        compute(cache, request, len(prompt) + count - 1, len(prompt) + count)
    key = key.extended(output[:-1]) if len(output) > 1 else key
    cache.cache_finished_req(request, key)
    cache.poll()  # once per step
    return key


def main() -> None:
    """Serve two turns, evict all pages from L1, print the location of the pages, and change the weights."""
    system, question, answer = list(range(200)), list(range(1000, 1045)), list(range(2000, 2030))
    more = list(range(3000, 3020))
    stream, index = EventStream(EVENTS_BYTES), PrefixIndex()
    reader = stream.subscribe()
    with create_cache(CONFIG, Namespace(model="stamp", geometry=GEOMETRY)) as cache:
        assert isinstance(cache, SessionCache), "sessions.enabled is false"
        cache.record_events(stream)  # before the first request
        turn(cache, "warm-up", None, system, answer[:1])
        pin = cache.pin(RadixKey.of(system, cache_salt="alice"), ttl_s=3600)
        assert pin is not None, "pins would take more than pin_host_share of L2"
        cache.open_session("alice")
        turn(cache, "turn-1", "alice", system + question, answer)
        last = turn(cache, "turn-2", "alice", system + question + answer + more, answer[:1])
        cache.close_session("alice")
        cache.drain(WAIT_S)
        cache.evict(cache.device.pages)  # evicts every page that may leave L1
        cache.drain(WAIT_S)
        index.apply(reader.drain(1_000_000))
        keys = page_keys(last.tokens, PAGE_SIZE, last.seed)
        print(f"pinned: {pin.pages} pages; after L1 was emptied, on the host: "
              f"{index.prefix_pages(keys, Medium.HOST)} of {len(keys)} pages")
        print(pretty_print(cache.tree))
        turn(cache, "again", None, system + question, answer[:1])
        cache.update_weights(1)
        turn(cache, "new weights", None, system + question, answer[:1])
        print(f"pin: {'active' if pin.active else 'ended'}, sessions: {cache.session_statistics().open}")
        cache.check()


if __name__ == "__main__":
    main()

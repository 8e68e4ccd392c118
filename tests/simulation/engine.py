"""The engine of a simulation: its requests and all other calls to the cache. Each public method is one action."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from hicache.cache.prefetch_states import AT_REST, State
from hicache.errors import TransferError
from hicache.hints import KINDS
from hicache.keys import RadixKey, namespace_seed
from hicache.tiers import Transfer
from hicache.types import NO_PAGES, PageIds
from tests.cache.hinting import action
from tests.simulation.memory import JUNK, Finding
from tests.simulation.setting import Parts, Running, Span, Waiting
from tests.simulation.world import World

RUNNING_MAX = 4
TALKS_MAX = 6
PINS_MAX = 3


class Engine(World):
    """See the module's docstring."""

    def __init__(self, seed: int, parts: Parts) -> None:
        super().__init__(seed, parts)
        self.hints = Counter[tuple[str, str]]()  # outcomes of hints without a request
        self._hint_numbers = random.Random(seed)
        self.verified_pages = 0  # pages of which all layers were compared
        self.verified_slots = 0
        self._crowded = False
        self.waiting: list[Waiting] = []
        self.running: list[Running] = []
        self._talks: list[tuple[list[int], bytes]] = []  # prompts that later requests continue or repeat
        self._arrivals = 0
        self._early: Transfer | None = None  # an earlier load that the next forward also waits for

    # Requests

    def arrive(self) -> None:
        if len(self.waiting) >= RUNNING_MAX:
            return
        tokens, seed = self._prompt()
        waiting = Waiting(f"r{self._arrivals}", tokens, seed)
        self._arrivals += 1
        self.waiting.append(waiting)
        if self.parts.hints:
            self._hint_request(waiting)
        if self.random.random() < 0.9:
            self._prefetch(waiting)

    def _prefetch(self, waiting: Waiting) -> None:
        self.cache.prefetch_from_storage(waiting.rid, self.key(waiting.tokens, waiting.seed))

    def _prompt(self) -> tuple[list[int], bytes]:
        """Return an old conversation, one with another turn, one that branches off, or a new one."""
        numbers = self.random
        tokens: list[int] = []
        seed = namespace_seed(cache_salt="tenant") if numbers.random() < 0.2 else b""
        if self._talks and numbers.random() < 0.85:
            tokens, seed = numbers.choice([numbers.choice(self._talks), self._talks[-1], self._demoted()])
            if numbers.random() < 0.6:
                return tokens, seed
            tokens = tokens[: numbers.choice([len(tokens), numbers.randint(1, len(tokens))])]
        return self._new_talk(tokens, seed)

    def _demoted(self) -> tuple[list[int], bytes]:
        """Return the conversation with the most pages on L2 only. With such small pools, chance rarely selects one."""
        return max(self._talks, key=lambda talk: self.cache.tree.peek(self.key(*talk)).host_pages)

    def _new_talk(self, tokens: list[int], seed: bytes) -> tuple[list[int], bytes]:
        longest = self.setting.prompt_tokens_max
        more = self.random.randint(2, max(2, longest - len(tokens)))
        tokens = (tokens + [self.random.randrange(4) for _ in range(more)])[:longest]
        self._talks.append((tokens, seed))
        del self._talks[:-TALKS_MAX]
        return tokens, seed

    def _some_prefix(self) -> RadixKey | None:
        """Return the key of a part of a conversation."""
        if not self._talks:
            return None
        tokens, seed = self.random.choice(self._talks)
        return self.key(tokens[: self.random.randint(2, len(tokens))], seed)

    def admit(self) -> None:
        if not self.waiting or len(self.running) >= RUNNING_MAX:
            return
        waiting = self.random.choice(self.waiting)
        if self.cache.check_prefetch_progress(waiting.rid) or self.random.random() > 0.98:
            self._begin(waiting)

    def _begin(self, waiting: Waiting) -> None:
        if len(self.running) >= RUNNING_MAX or self._crowded:
            return
        try:
            key = self.key(waiting.tokens, waiting.seed)
            request = self.cache.begin_request(waiting.rid, key, priority=self.random.randrange(3))
        except TransferError:
            self._abort(waiting)
            return
        if request is None:
            return
        self.waiting.remove(waiting)
        running = Running(
            request, waiting.tokens.copy(), waiting.seed, self.epoch, request.cached_tokens, NO_PAGES
        )
        if request.shared_pages * self.cache.page_size != request.cached_tokens:
            raise Finding("counters", f"{request.shared_pages} shared pages, but {request.cached_tokens} cached tokens")
        account = request.account
        if account is None or account.tokens != account.cached + sum(account.computed.values()):
            raise Finding("counters", f"each token of a prompt has one source, but the account is {account}")
        self._name_pages(running)
        self.running.append(running)
        if request.load is not None and self.random.random() < 0.2:
            self._end(running, None)  # the client disconnects before the load starts

    def load_early(self) -> None:
        """Start loads before the forward. Until the forward, requests may be aborted and others may begin."""
        self._early = self._early or self.cache.start_loading()

    def forward(self) -> None:
        """Queue a chunk of every running request. Each layer reads the cached pages and writes the new ones."""
        if self.random.random() < 0.5:
            self.device.stream.synchronize()  # an engine waits here for the tokens of earlier forwards
        began_s = self.clock()
        transfers = [transfer for transfer in (self._early, self.cache.start_loading()) if transfer is not None]
        self._early = None
        for running in self.running:
            missing = self._positions(running) - running.computed
            running.chunk = self.random.randint(1, missing) if missing else 0
            while running.chunk and not self._prepare(running):
                running.chunk //= 2
        self._give_way()
        spans = [self._span(running) for running in self.running]
        try:
            for layer in range(self.setting.all_layers.layers):
                self._wait(transfers, layer)
                if spans:
                    pool = layer - self.setting.geometry.layers
                    work = partial(self._compute, layer, spans) if pool < 0 else partial(self._trail, pool, spans)
                    self.device.stream.submit(work)
        except TransferError:
            self.cache.record_fence(self.device.stream.fence())
            for running in [running for running in self.running if running.fresh]:
                self._end(running, None)
            return
        self.cache.record_fence(self.device.stream.fence())
        for running in self.running:
            running.computed += running.chunk
            running.fresh = False
        if not transfers:
            self.cache.record_prefill(sum(running.chunk for running in self.running), self.clock() - began_s)
        self.share()

    def _give_way(self) -> None:
        """Preempt a request if no other can compute, because all wait for slots; then none begins until one ends."""
        waiting = [running for running in self.running if self._positions(running) > running.computed]
        if waiting and not any(running.chunk for running in self.running):
            self._preempt(self.random.choice(waiting))
            self._crowded = bool(self.running)

    def _prepare(self, running: Running) -> bool:
        return self.cache.prepare(running.request, running.computed, running.computed + running.chunk)

    def _wait(self, transfers: list[Transfer], layer: int) -> None:
        """Wait for a layer. The scheduler is busy; devices and workers continue."""
        self.alone = True
        try:
            for transfer in transfers if self.parts.waits_for_layers else ():
                transfer.wait_layer(layer)
            if self.random.random() < 0.2:
                self.work()
        finally:
            self.alone = False

    def _span(self, running: Running) -> Span:
        """Return what the forward reads and writes for a request. It does not change if the request ends before."""
        page_size, done = self.cache.page_size, running.computed + running.chunk
        pages = running.request.pages
        return Span(
            running.request.rid, pages, running.rows, running.computed // page_size, done // page_size,
            writes_partial=done % page_size > 0 and running.chunk > 0,
            slots=[pool.slots(pages) for pool in self.trailing], reads=[pool.trailing_pages for pool in self.trailing],
        )

    def _compute(self, layer: int, spans: list[Span]) -> None:
        """Compare the KV of one layer that attention reads, then write the KV of the chunks."""
        table, blocks = self.stamps.table[layer], self.device.memory[layer]
        for span in spans:
            wrong = blocks[:, span.pages[: span.first]] != table[:, span.rows[: span.first]]
            if wrong.any():
                raise Finding(
                    "wrong bytes",
                    f"{span.rid} read wrong KV in layer {layer}, pages of the prompt "
                    f"{np.flatnonzero(wrong.any(axis=(0, 2))).tolist()}",
                )
            self.verified_pages += span.first if layer == 0 else 0
        for span in spans:
            own = slice(span.first, span.end)
            blocks[:, span.pages[own]] = table[:, span.rows[own]]
            if span.writes_partial:
                blocks[:, span.pages[span.end]] = JUNK  # other requests must not use a partial page

    def _trail(self, pool: int, spans: list[Span]) -> None:
        """As `_compute`, for the layer of a trailing pool: of the cached pages only the last are read."""
        table, blocks = self.stamps.table[self.setting.geometry.layers + pool], self.slots[pool].memory[0]
        for span in spans:
            read = slice(max(0, span.first - span.reads[pool]), span.first)
            slots = span.slots[pool][read]
            if not slots.all() or (blocks[:, slots] != table[:, span.rows[read]]).any():
                raise Finding("wrong bytes", f"{span.rid} read slots {slots.tolist()} of pool {pool}, pages {read}")
            self.verified_slots += len(slots)
        for span in spans:
            own = slice(span.first, span.end)
            blocks[:, span.slots[pool][own]] = table[:, span.rows[own]]
            if span.writes_partial:
                blocks[:, span.slots[pool][span.end]] = JUNK

    def share(self) -> None:
        """Insert the computed chunks into the tree."""
        for running in self.running:
            if running.fresh or not running.computed or self.random.random() < 0.4:
                continue
            pages = running.request.pages
            self.cache.cache_unfinished_req(running.request, self._computed_key(running))
            # The request now uses pages of the tree, which may still be loading from L2.
            running.fresh = running.request.pages is not pages

    def decode(self) -> None:
        running = self._pick_computed()
        if running is None:
            return
        if len(running.tokens) == self.cache.device.pages * self.cache.page_size:
            self._end(running, self._computed_key(running))  # the sequence fills L1
        elif self.cache.extend(running.request, len(running.tokens) + 1):
            running.tokens.append(self.random.randrange(4))
            self._name_pages(running)
        elif self.random.random() < 0.5:
            self._preempt(running)

    def _preempt(self, running: Running) -> None:
        """Put a request back into the queue, as an engine does if L1 is full. The output becomes part of the prompt."""
        self._end(running, None if running.fresh or not running.computed else self._computed_key(running))
        waiting = Waiting(running.request.rid, running.tokens[: self.setting.prompt_tokens_max], running.seed)
        self.waiting.append(waiting)
        self._prefetch(waiting)

    def finish(self) -> None:
        running = self._pick_computed()
        if running is not None:
            self._end(running, self._computed_key(running))

    def abort_running(self) -> None:
        fresh = [running for running in self.running if running.fresh]
        candidates = fresh if fresh and self.random.random() < 0.5 else self.running
        if candidates:
            self._end(self.random.choice(candidates), None)

    def abort_waiting(self) -> None:
        if self.waiting:
            self._abort(self.random.choice(self.waiting))

    def _abort(self, waiting: Waiting) -> None:
        self.waiting.remove(waiting)
        self.cache.abort_prefetch(waiting.rid)

    def interrupt(self) -> None:
        """Abort, begin, or start again a request in one of the states in which prefetches are now: chance alone rarely
        selects a request in a rare state.
        """
        table, found = self.cache._prefetcher._table, dict[State, Waiting]()
        for waiting in self.waiting:
            prefetch = table.get(waiting.rid)
            if prefetch is not None:
                found[prefetch.state] = waiting
        if not found:
            return
        state = self.random.choice(sorted(found, key=lambda state: state.value))
        may_start = state in AT_REST and len(found[state].tokens) < self.setting.prompt_tokens_max
        do = self._start_again if may_start else self.random.choice([self._start_again, self._begin, self._abort])
        do(found[state])

    def _start_again(self, waiting: Waiting) -> None:
        """Prefetch a longer prompt for the same request, as an engine does for the next turn of a session."""
        if len(waiting.tokens) < self.setting.prompt_tokens_max:
            waiting.tokens.extend(self._longer(waiting.tokens, waiting.seed))
        self._prefetch(waiting)

    def _longer(self, tokens: list[int], seed: bytes) -> list[int]:
        """Return the rest of a conversation that begins with `tokens`, so that storage may have it, or new tokens."""
        for known, its_seed in self._talks:
            if its_seed == seed and len(known) > len(tokens) and known[: len(tokens)] == tokens:
                return known[len(tokens) :]
        return [self.random.randrange(4) for _ in range(self.setting.prompt_tokens_max - len(tokens))]

    def _end(self, running: Running, key: RadixKey | None) -> None:
        self.running.remove(running)
        self._crowded = False
        self.cache.cache_finished_req(running.request, key)

    def _pick_computed(self) -> Running | None:
        done = [each for each in self.running if each.computed == self._positions(each) and not each.fresh]
        return self.random.choice(done) if done else None

    def _positions(self, running: Running) -> int:
        return len(running.tokens) - self.setting.bigram

    def _computed_key(self, running: Running) -> RadixKey:
        return self.key(running.tokens[: running.computed + self.setting.bigram], running.seed)

    def _name_pages(self, running: Running) -> None:
        running.rows = self.stamps.rows(self.page_keys(self.key(running.tokens, running.seed)), running.epoch)

    # Other calls

    def match(self) -> None:
        """Match a part of a conversation, which may split a node."""
        key = self._some_prefix()
        if key is not None:
            seen = self.cache.tree.peek(key)
            found = self.cache.match_prefix(key)
            if seen != (len(found.device_pages), found.host_hit_pages):
                raise Finding("counters", f"peek returned {seen}, but match {found}")

    def insert(self) -> None:
        """Insert a whole prompt, as if its pages had been computed elsewhere."""
        key = self.key(*self._prompt())
        keys = self.page_keys(key)
        pages = self.cache.page_source.alloc(len(keys))
        if pages is None:
            return
        self.device.stream.submit(partial(self._write, pages, self.stamps.rows(keys, self.epoch)))
        self.cache.record_fence(self.device.stream.fence())
        inserted = self.cache.insert(key, pages, priority=self.random.randrange(3))
        self.cache.page_source.free(pages[: inserted.present_pages])

    def _write(self, pages: PageIds, rows: PageIds) -> None:
        self.device.memory[:, :, pages] = self.stamps.table[: len(self.device.memory), :, rows]

    def evict(self) -> None:
        pages, free = self.setting.device_pages, self.device.allocator.free_pages
        wanted = self.random.choice([pages, self.random.randint(1, pages)])
        eviction = self.cache.evict(wanted)
        freed = self.device.allocator.free_pages - free
        promised = eviction.freed_pages + eviction.writeback_pages + eviction.short_pages
        if freed != eviction.freed_pages or promised < wanted or eviction.writeback_pages > self.cache.writeback_pages:
            raise Finding("counters", f"evict({wanted}) freed {freed} pages and returned {eviction}")

    def pin(self) -> None:
        self.auditor.pins = [(pin, key) for pin, key in self.auditor.pins if pin.active]
        key = self._some_prefix()
        if key is not None and len(self.auditor.pins) < PINS_MAX:
            pin = self.cache.pin(key, self.random.choice([0.01, 0.3, 5.0, 1000.0]))
            if pin is not None:
                self.auditor.pins.append((pin, key))

    def unpin(self) -> None:
        if self.auditor.pins:
            self.random.choice(self.auditor.pins)[0].release()

    def poll(self) -> None:
        due = [pin for pin, _ in self.auditor.pins if pin.expires_at <= self.clock.time_s]
        self.cache.poll()
        if any(pin.active for pin in due):
            raise Finding("pin", "an expired pin is still active")

    def hint(self) -> None:
        """Send a hint about a conversation or a session, and compare its outcome with the tree."""
        numbers = self._hint_numbers
        if not self._talks:
            return
        tokens, seed = numbers.choice(self._talks)
        tokens = tokens[: numbers.randint(2, len(tokens))]
        kind, target = self._drawn_hint()
        if is_explicit := numbers.random() < 0.7:
            target["tokens"] = tokens
        if seed:
            target["cache_salt"] = "tenant"
        key = self.key(tokens, seed)
        before = self.cache.tree.peek(key)
        (found,) = self.cache.hint({"actions": [action(kind, **target)]})
        after = self.cache.tree.peek(key)
        self.hints[kind, found.status.value] += 1
        if is_explicit and kind != "kv.prefetch" and (found.status == "missing") != (sum(before) == 0):
            raise Finding("hint", f"{found}, but the tree had {before}")
        if is_explicit and found.pages > key.pages(self.cache.page_size):
            raise Finding("hint", f"{found} for {key}")
        if is_explicit and (kind == "kv.demote") < (after != before):
            raise Finding("hint", f"{found} changed {before} to {after}")

    def _hint_request(self, waiting: Waiting) -> None:
        actions = [self._drawn_hint() for _ in range(self._hint_numbers.choice([0, 0, 1, 3]))]
        self.cache.hint({"actions": [action(kind, **payload) for kind, payload in actions]}, waiting.rid)

    def _drawn_hint(self) -> tuple[str, dict[str, Any]]:
        """Return an action and its payload, for the last prompt of a session or a request."""
        numbers = self._hint_numbers
        kind = numbers.choice(list(KINDS))
        payload = {
            "session_id": numbers.choice([None, "s", "t", "u"]), "ttl_s": numbers.choice([0.01, 1.0, 300.0]),
            "value": numbers.choice([0.1, 1.0]), "needed_in_s": numbers.choice([0.0, 0.3, 5.0]),
            "destination": numbers.choice(["host", "storage" if kind == "kv.demote" else "device"]),
            "expected_s": numbers.choice([0.0, 0.1, 5.0]), "source": numbers.choice("ab"),
        }
        return kind, payload

    def clear(self) -> None:
        self.cache.clear()
        self._require_empty()

    def update_weights(self) -> None:
        """Change the weights. From now on, a page of the old weights has wrong bytes."""
        self.epoch += self.random.choice([1, 1, 3])
        self.cache.update_weights(self.epoch)
        self._require_empty()

    def switch_storage(self) -> None:
        """Detach storage, or attach one of the two servers, as an operator does."""
        if self.setting.storage_pages is None:
            return
        self.stores.attached = False
        if self.cache.storage.attached and self.random.random() < 0.4:
            self.cache.storage.detach()
        else:
            self.stores = self.random.choice(self.servers)
            self.stores.attached = True
            self.cache.storage.attach(self.stores.open)
        if any(node.stored for node in self.cache.tree.nodes()):
            raise Finding("stale mark", "pages of another store are marked as stored in the attached one")

    def _require_empty(self) -> None:
        if self.cache.tree.node_count or any(pin.active for pin, _ in self.auditor.pins):
            raise Finding("left behind", "the cache was emptied, but has nodes or active pins")

    def follow(self) -> None:
        """Read all events, as a router does, and compare its index with the tree."""
        if self.follower is not None:
            self.follower.compare()

    # The world

    def copy(self) -> None:
        for _ in range(self.random.randint(1, 24)):
            self.copies.tick()

    def work(self) -> None:
        """Run one waiting job on a worker."""
        ready = [group for group in self.workers if group.ready]
        if ready:
            self.random.choice(ready).work()

    def wait_a_while(self) -> None:
        self.clock.time_s += self.random.choice([0.001, 0.01, 0.03, 0.1, 0.1, 0.3, 4.0])

    def others_store(self) -> None:
        """Store a conversation as another engine, perhaps with newer weights. Later requests are likely to use it."""
        tokens, seed = self._prompt() if self.random.random() < 0.3 else self._new_talk([], b"")
        epoch = self.epoch + (self.random.random() < 0.1)
        self.stores.of(epoch).store_as_another_engine(self.page_keys(self.key(tokens, seed)))

    def harm_store(self) -> None:
        self.stores.of(self.epoch).lose_or_damage_page()

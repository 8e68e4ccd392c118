"""What hints may take at most: of L2, of L1 and of memory, whoever sends them, and however many."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import hicache.cache.hints
from hicache.cache.hints import HintExecutor
from hicache.cache.timers import Timers
from hicache.keys import RadixKey
from hicache.radix import Match
from tests.cache.hinting import action, bounds, require_nothing_left, send, tokens
from tests.cache.host_world import HostWorld
from tests.cache.world import StepClock, World, every_hit, prompt
from tests.seeds import rng, seeds

HOST_PAGES, DEVICE_PAGES = 48, 24
SESSION_SHARE, ALL_SHARE = 0.25, 0.5
VICTIM = [prompt(900 + number) for number in range(6)]
CONFIG = every_hit(hints={"session_share": SESSION_SHARE, "ttl_max": 1e6}, pin_host_share=ALL_SHARE)


class Adversary:
    """Serves prompts of its own and asks to keep all of them, in each way: of requests and alone, under names and
    without, for one prompt again and again, with growing and with branching prompts."""

    def __init__(self, seed: int, cache: Any, serve: Callable[[str, RadixKey], None], sessions: int) -> None:
        self.random = rng(seed)
        self.cache = cache
        self._serve = serve
        self._names = [None, *(f"s{number}" for number in range(sessions - 1))] if sessions > 1 else ["s"]
        self._prompts: list[RadixKey] = []
        self._served = 0

    def _payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = {"ttl_s": self.random.choice([1, 1e3, 1e6]), "value": self.random.choice([0.1, 1])}
        name = self.random.choice(self._names)
        return payload if name is None else {**payload, "session_id": name}

    def act(self) -> None:
        kind = self.random.choice(["kv.pin", "kv.retain"])
        if self._prompts and self.random.random() < 0.5:
            key = self.random.choice(self._prompts)
            send(self.cache, kind, tokens=tokens(key.head(4 * self.random.randint(1, key.pages(4)))), **self._payload())
            return
        base = self.random.choice(self._prompts).tokens[: 16 * self.random.randint(0, 3)] if self._prompts else b""
        key = RadixKey(base, b"").extended([self.random.randrange(50) for _ in range(4 * self.random.randint(1, 6))])
        key = key.head(32)
        rid = f"evil {self._served}"
        self._served += 1
        send(self.cache, kind, rid, **self._payload())
        self._serve(rid, key)
        self._prompts = [*self._prompts[-20:], key]


class Unbounded(HintExecutor):
    """The control: a cache that grants what is asked."""

    def _within_shares(self, key: RadixKey, match: Match, session: Any) -> tuple[Match, str]:
        return match, ""

    def check(self) -> None:
        """Check nothing."""


def embedded(kind: type[HintExecutor], sessions: int, seed: int) -> tuple[World, Adversary]:
    world = World(device_pages=DEVICE_PAGES, host_pages=HOST_PAGES, clock=StepClock(), config=CONFIG)
    use(world.cache, kind)
    world.cache._hints.device = world.cache._l1

    def serve(rid: str, key: RadixKey) -> None:
        if (request := world.try_begin(rid, key)) is not None:
            world.cache.cache_finished_req(request, key)
        world.settle()

    return world, Adversary(seed, world.cache, serve, sessions)


def engine_owned(kind: type[HintExecutor], sessions: int, seed: int) -> tuple[HostWorld, Adversary]:
    world = HostWorld(host_pages=HOST_PAGES, clock=StepClock(), config=CONFIG)
    use(world.cache, kind)

    def serve(rid: str, key: RadixKey) -> None:
        world.cache.lookup(rid, key)
        if world.cache.tree.peek(key).host_pages < key.pages(4) and (write := world.cache.begin_write(rid, key)):
            world.copy(key, write)
            world.cache.end_write(write, complete=True)
        world.cache.abort(rid)
        world.step()

    return world, Adversary(seed, world.cache, serve, sessions)


def use(cache: Any, kind: type[HintExecutor]) -> None:
    """Let a cache use another class of executor."""
    cache._hints = kind(cache._trees, cache._l2, cache.controller, cache._counters, cache._pins, cache._prefetcher)
    if kind is Unbounded:
        cache._pins._pages_max = 1 << 30


def kept_pages(cache: Any) -> int:
    """Return the pages of L2 that pins and hints keep from an eviction by other pages."""
    tree = cache.tree
    return sum(
        tree.pages(node) for node in tree.nodes() if node.pin_ref or (node.hint is not None and node.hint.value > 0)
    )


def attack(
    make: Callable[[type[HintExecutor], int, int], tuple[Any, Adversary]], kind: type[HintExecutor], sessions: int,
    seed: int,
) -> tuple[int, int]:
    """Let an adversary act, then serve a victim. Return the most pages that were kept, and how many pages of the victim
    stay in the cache although the adversary goes on to send hints only."""
    world, adversary = make(kind, sessions, seed)
    most = 0
    for _ in range(60):
        adversary.act()
        world.cache.check()
        most = max(most, kept_pages(world.cache))
    for number, key in enumerate(VICTIM):
        adversary._serve(f"victim {number}", key)
    for _ in range(60):
        key = adversary.random.choice(adversary._prompts)
        send(world.cache, adversary.random.choice(["kv.pin", "kv.retain"]), tokens=tokens(key), **adversary._payload())
        most = max(most, kept_pages(world.cache))
    for number in range(3):
        adversary._serve(f"later {number}", prompt(800 + number))
    stay = sum(sum(world.cache.tree.peek(key)) for key in VICTIM)
    world.cache.clear()
    return most, stay


@pytest.mark.parametrize("make", [embedded, engine_owned])
@pytest.mark.parametrize("seed", seeds(4))
def test_an_adversary_keeps_no_more_than_its_share_and_others_are_served(seed: int, make: Any) -> None:
    one, victim_pages = attack(make, HintExecutor, 1, seed)
    assert 0 < one <= SESSION_SHARE * HOST_PAGES and victim_pages == len(VICTIM)
    many, victim_pages = attack(make, HintExecutor, 30, seed)
    assert one < many <= ALL_SHARE * HOST_PAGES and victim_pages == len(VICTIM)


@pytest.mark.parametrize("make", [embedded, engine_owned])
def test_without_its_shares_an_adversary_takes_l2(make: Any) -> None:
    """The control."""
    assert max(attack(make, Unbounded, 1, seed)[0] for seed in range(3)) > 0.75 * HOST_PAGES


class Refreshes(HintExecutor):
    """The control: a hint counts as a use, so pages of an adversary stay the last used ones without requests."""

    def _apply(self, hint: Any, key: RadixKey, session: Any) -> Any:
        self._trees.current.match(key)
        return super()._apply(hint, key, session)


@pytest.mark.parametrize(("kind", "victim_stays"), [(HintExecutor, True), (Refreshes, False)])
def test_hints_without_requests_do_not_keep_pages_on_l1(kind: type[HintExecutor], victim_stays: bool) -> None:
    world, _ = embedded(kind, 2, 0)
    evil = [prompt(number) for number in range(DEVICE_PAGES - len(VICTIM))]
    for number, key in enumerate([*evil, *VICTIM]):
        world.serve(f"{number}", key)
        world.settle()
    for _ in range(3):
        for key in evil:
            send(world.cache, "kv.pin", tokens=tokens(key), session_id="evil")
            send(world.cache, "kv.retain", tokens=tokens(key), session_id="evil")
    world.cache.evict(len(VICTIM))
    world.settle()
    assert all(world.cache.peek(key).device_pages for key in VICTIM) == victim_stays


def test_a_running_request_does_not_retain_what_it_computes_later() -> None:
    world = World(
        device_pages=32, host_pages=32, clock=StepClock(),
        config=every_hit(write_policy="write_back", hints={"session_share": 0.125}),
    )
    long = prompt(*range(16), tail=0)
    request = world.begin("a", long)
    world.cache.cache_unfinished_req(request, long.head(8))
    assert send(world.cache, "kv.retain", tokens=tokens(long)).pages == 2
    world.cache.cache_finished_req(request, long)
    world.cache.check()
    assert kept_pages(world.cache) == 2


# Memory


def flood(world: World, count: int, numbers: random.Random) -> None:
    """Send `count` hints of each kind, under new names, sources, tenants and requests."""
    for number in range(count):
        key = prompt(numbers.randrange(40), numbers.randrange(40))
        name, source = f"{number} {numbers.random()}", f"{numbers.random()}"
        for kind, payload in (
            ("session.wait", {"expected_s": 1e6, "source": source}), ("kv.retain", {"ttl_s": 1e6}),
            ("kv.prefetch", {"needed_in_s": 500}), ("kv.pin", {"ttl_s": 1e6}), ("session.turn", {}),
        ):
            send(world.cache, kind, tokens=tokens(key), session_id=name, **payload)
            send(world.cache, kind, tokens=tokens(key), cache_salt=name, **payload)
            send(world.cache, kind, tokens=tokens(key), **payload)
        send(world.cache, "session.turn", f"never begins {name}", session_id=name)
        if number % 20 == 0:
            rid = f"r {name}"
            send(world.cache, "session.wait", rid, session_id=name, expected_s=1e6, source=source)
            world.settle()  # copies of pinned pages
            world.serve(rid, key)


def test_ten_times_as_many_hints_need_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("SESSIONS_MAX", 40), ("REQUESTS_MAX", 20), ("SOURCES_MAX", 6), ("KEY_BYTES_MAX", 400)):
        monkeypatch.setattr(hicache.cache.hints, name, limit)
    monkeypatch.setattr("hicache.cache.timers.TIMERS_MAX", 60)
    world, numbers = World(clock=StepClock(), config=every_hit(hints={"ttl_max": 600})), rng(0)
    most: list[int] = [0] * 6
    for round_ in range(11):
        flood(world, 30, numbers)
        world.cache.check()
        most = [max(old, new) for old, new in zip(most, bounds(world.cache), strict=True)]
        if round_ == 0:
            assert most[0] == 40 and most[2] == 20 and most[4] >= 60
    limits = (40, 400, 20, 6, 2 * 60 + 64, 16)
    assert all(size <= limit for size, limit in zip(most, limits, strict=True)), most
    clock = world.controller.clock
    assert isinstance(clock, StepClock)
    clock.advance(6001)  # ten times `ttl_max`, when waits are given up
    world.step()
    world.cache._hints._requests.clear()
    require_nothing_left(world.cache)
    assert bounds(world.cache)[4:] == (0, 0)


def test_the_prompts_of_sessions_have_a_limit_of_bytes_and_the_last_one_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = prompt(1, 2, 3)
    monkeypatch.setattr(hicache.cache.hints, "KEY_BYTES_MAX", 2 * len(key.tokens) + 1)
    world = World()
    for number in range(5):
        send(world.cache, "session.turn", f"{number}", session_id=f"{number}")
        world.serve(f"{number}", key)
    found = [send(world.cache, "session.turn", session_id=f"{number}").status.value for number in range(5)]
    assert found == ["missing"] * 3 + ["accepted"] * 2
    monkeypatch.setattr(hicache.cache.hints, "KEY_BYTES_MAX", 1)
    send(world.cache, "session.turn", "last", session_id="last")
    world.serve("last", key)
    assert send(world.cache, "session.turn", session_id="last").status == "accepted"
    world.cache.check()


def test_a_request_has_a_limit_of_hints() -> None:
    world = World()
    envelopes = [{"actions": [action("session.turn", session_id="s")] * 40} for _ in range(3)]
    found = [one.status.value for envelope in envelopes for one in world.cache.hint(envelope, "a")]
    assert found == ["deferred"] * 64 + ["rejected"] * 56


def test_a_session_retains_few_prompts_at_a_time() -> None:
    world = World(device_pages=200, host_pages=400, config=every_hit(hints={"session_share": 1}, pin_host_share=1))
    found = []
    for number in range(70):
        world.serve(f"{number}", prompt(number))
        found.append(send(world.cache, "kv.retain", tokens=tokens(prompt(number)), session_id="s").status.value)
    assert found == ["accepted"] * 64 + ["rejected"] * 6
    assert send(world.cache, "kv.retain", tokens=tokens(prompt(69)), session_id="other").status == "accepted"


def test_cancelled_timers_are_forgotten_and_others_run_in_order() -> None:
    timers, numbers, ran = Timers(), rng(0), list[float]()
    due: dict[int, float] = {}
    for _ in range(3000):
        due_s = numbers.uniform(0, 100)
        due[timers.at(due_s, lambda due_s=due_s: ran.append(due_s))] = due_s  # type: ignore[misc]
        if len(due) > 10:
            number = numbers.choice(list(due))
            timers.cancel(number)
            timers.cancel(number)
            del due[number]
        assert len(timers) == len(due) and len(timers._heap) <= 2 * (len(due) + 1) + 64
    timers.advance(50)
    assert ran == sorted(due_s for due_s in due.values() if due_s <= 50)
    timers.advance(100)
    assert ran == sorted(due.values()) and len(timers) == 0


def test_the_records_of_few_sources_are_kept_the_last_ones() -> None:
    world = World()
    world.serve("a", prompt(1))
    for number in range(200):
        send(world.cache, "session.wait", tokens=tokens(prompt(1)), session_id="s", expected_s=1, source=f"{number}")
    assert list(world.cache._hints._records)[-1] == "199"
    assert len(world.cache._hints._records) == hicache.cache.hints.SOURCES_MAX
    assert len(world.cache._hints._timers) == 1


def test_a_cache_with_hints_is_collected_with_its_tree() -> None:
    world, key = World(config=CONFIG), prompt(1)
    for kind, entries in (("kv.retain", {"ttl_s": 1e3, "value": 1}), ("kv.pin", {"ttl_s": 1e3})):
        send(world.cache, kind, "r", session_id="s", **entries)
        world.serve("r", key)
    world.settle()
    assert any(node.hint is not None for node in world.cache.tree.nodes()) and world.cache.tree.pinned_pages
    cache, tree = weakref.ref(world.cache), weakref.ref(world.cache.tree)
    nodes = [weakref.ref(node.device) for node in world.cache.tree.nodes()]
    world.controller.close(1.0)
    world.leave()
    del world
    gc.collect()
    assert cache() is None and tree() is None and not any(ids() is not None for ids in nodes)

"""Random conversations over three tiers that are much too small. All served tokens are compared byte by byte."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from hicache.backends.storage import Storage
from hicache.cache import RequestKV, SessionCache
from hicache.cache import session_cache as module
from hicache.config import TransferConfig
from hicache.errors import CapacityError, SessionError
from hicache.keys import BIGRAM_BYTES, TOKEN_BYTES, RadixKey
from tests.cache.talks import PAGE, Talk, Talks
from tests.cache.world import codec, every_hit, memory_backend, prefetch
from tests.seeds import rng, seeds
from tests.tuned import tuned

pytestmark = pytest.mark.long

STEPS = 400
STORE_BYTES = 100 * codec().frame_bytes
SESSIONS = ["a", "b", "c", "d"]
LENGTH_MAX = 10 * PAGE


def _store(epoch: int) -> Storage:
    return memory_backend(STORE_BYTES, epoch)


class RandomTalks:
    """An engine that runs a few requests, mostly turns, and chooses each next action at random."""

    def __init__(self, numbers: random.Random, kind: type[SessionCache] = SessionCache) -> None:
        self.random = numbers
        self.talks = Talks(
            sessions_max=3, kind=kind, device_pages=16, host_pages=30, backend=_store(0), open_storage=_store,
            config=every_hit(
                write_policy=numbers.choice(["write_through", "write_through_selective", "write_back"]),
                prefetch=prefetch(threshold_tokens=8, timeout_base=0.005, timeout_per_1024_tokens=0),
            ),
            transfer=tuned(TransferConfig, storage_batch_pages=2, write_pages_max=30, load_pages_max=20),
            position_bytes=numbers.choice([TOKEN_BYTES, BIGRAM_BYTES]),
        )
        self.talks.leave()  # the tests close it
        self.history: dict[str, list[int]] = {}  # the tokens of each conversation, as its client knows them
        self.running: list[tuple[Talk, str | None]] = []
        self.seen: Counter[str] = Counter()
        self.count = 0

    def words(self, most: int) -> list[int]:
        return [self.random.randrange(3) for _ in range(self.random.randint(1, most))]

    def prompt(self, session_id: str) -> list[int]:
        """Return mostly the conversation with new tokens; sometimes only a part of it, or other tokens."""
        said, choice = self.history.get(session_id, []), self.random.random()
        if choice < 0.15:
            said = said[: self.random.randint(0, len(said))]
        elif choice < 0.2:
            said = []
        elif choice < 0.3:
            said = [*said[:-2], *self.words(2)]
        return [*said, *self.words(6)][-LENGTH_MAX:] if len(said) < LENGTH_MAX else self.words(12)

    def open(self) -> None:
        try:
            self.talks.cache.open_session(self.random.choice(SESSIONS), ttl_s=self.random.choice([20.0, 1000.0]))
        except (CapacityError, ValueError) as error:
            self.seen[type(error).__name__] += 1

    def arrive(self) -> None:
        if len(self.running) == 4:
            return
        session_id = self.random.choice([*SESSIONS, None])
        prompt = self.words(20) if session_id is None else self.prompt(session_id)
        self.count += 1
        rid = f"r{self.count}"
        if self.random.random() < 0.5:
            self.talks.cache.prefetch_from_storage(rid, self.talks.key(prompt))
            self.talks.world.until(lambda: self.talks.cache.check_prefetch_progress(rid))
        try:
            talk = self.talks.try_begin(prompt, session_id, rid=rid)
        except SessionError as error:
            self.seen[type(error).__name__] += 1
            talk = None
        if talk is not None:
            self.running.append((talk, session_id))
        else:
            self.talks.cache.abort_prefetch(rid)

    def decode(self) -> None:
        for talk, _ in self.running:
            self.talks.decode(talk, self.words(3))

    def share(self) -> None:
        if self.running:
            self.talks.share(self.random.choice(self.running)[0])

    def finish(self) -> None:
        if self.running:
            talk, session_id = self.running.pop(self.random.randrange(len(self.running)))
            if self.random.random() < 0.2:  # it ends with fewer tokens than it has computed
                least = talk.kv.shared_pages * PAGE + self.talks.bigram
                talk.computed = self.random.randint(max(1, least), talk.computed)
            self.talks.finish(talk)
            if session_id is not None and self.random.random() < 0.9:  # else it was preempted, and is aborted
                self.history[session_id] = talk.tokens[: talk.computed]

    def abort(self) -> None:
        if self.running:
            talk, _ = self.running.pop(self.random.randrange(len(self.running)))
            self.talks.compare(talk)
            self.talks.abort(talk)

    def close(self) -> None:
        if self.random.random() < 0.1:
            self.talks.cache.close_session(self.random.choice(SESSIONS))

    def drop(self) -> None:
        if self.random.random() < 0.05:
            self.talks.cache.drop_all()

    def empty(self) -> None:
        """Clear the cache or change the weights."""
        if self.random.random() < 0.1:
            if self.random.random() < 0.5:
                self.talks.cache.clear()
            else:
                self.talks.cache.update_weights(self.talks.cache.weights_epoch + 1)
            self.seen["emptied"] += 1

    def pass_time(self) -> None:
        self.talks.clock.advance(self.random.choice([1.0, 6.0]))

    def pressure(self) -> None:
        self.talks.cache.evict(self.random.randint(1, 12))

    def poll(self) -> None:
        self.talks.cache.poll()

    def run(self) -> None:
        actions = [self.open, self.open, self.arrive, self.arrive, self.arrive, self.decode, self.decode, self.share]
        actions += [self.finish, self.finish, self.finish, self.abort, self.close, self.drop, self.empty]
        actions += [self.pass_time, self.pressure, self.poll, self.poll]
        for _ in range(STEPS):
            self.random.choice(actions)()
            self.talks.cache.check()
            state = self.talks.cache.session_statistics()
            assert state.held_pages <= self.talks.world.device.pages * state.holding
        while self.running:
            self.finish()
        self.seen.update(self.talks.cache.session_statistics().released)
        self.seen["continued"] += self.talks.cache.session_statistics().continued_turns
        self.seen["tail_tokens"] += self.talks.cache.session_statistics().tail_tokens


@pytest.mark.parametrize("seed", seeds(8))
def test_random_turns_get_the_right_bytes_and_all_checks_pass(seed: int) -> None:
    engine = RandomTalks(rng(seed))
    engine.run()
    engine.talks.close()
    assert engine.talks.compared_tokens > 0


def test_the_random_turns_reach_all_ends_of_sessions_and_turns() -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        engine = RandomTalks(rng(seed))
        engine.run()
        engine.talks.close()
        seen += engine.seen
    reasons = {"pressure", "diverged", "expired", "closed", "dropped"}
    assert seen["continued"] > 0 and seen["tail_tokens"] > 0 and seen["emptied"] > 0
    assert reasons | {"UnknownSession", "SessionBusy", "CapacityError", "InvalidInput"} <= set(seen)


class ForgetsTheTail(SessionCache):
    """Counts the tokens of the partial page as cached, but does not move the page to the turn."""

    def _continue(self, session: module._Session, held: RequestKV, request: RequestKV) -> int:
        return len(held.key) % self.page_size


class ComparesWholePages(SessionCache):
    """Does not compare the tokens of the partial page with those of the turn."""

    def begin_request(self, rid: str, key: RadixKey, *, priority: int = 0) -> RequestKV | None:
        session = self._turns.get(rid)
        held = None if session is None else session.held
        if held is not None and len(key) > len(held.key) and self.peek(key).device_pages >= held.shared_pages:
            whole, end = held.shared_pages * PAGE * key.position_bytes, len(held.key.tokens)
            held.key = replace(held.key, tokens=held.key.tokens[:whole] + key.tokens[whole:end])
        return super().begin_request(rid, key, priority=priority)


@pytest.mark.parametrize("kind", [ForgetsTheTail, ComparesWholePages])
def test_the_random_turns_find_a_session_cache_that_serves_wrong_tokens(kind: type[SessionCache]) -> None:
    """The control: without the partial page, or without comparing its tokens, the cache serves wrong bytes."""
    engines = [RandomTalks(rng(seed), kind) for seed in range(4)]
    for engine in engines:
        engine.run()
    assert sum(engine.talks.wrong_tokens for engine in engines) > 0

"""One seed: a cache over simulated memory, devices, workers, storage and time, and an engine with random actions.

Everything runs on one thread and depends only on the seed. A step is one row of `ACTIONS`, followed by
`HiRadixCache.check()`. At the end, all work completes and all counters must be at zero. To add an action, add a method
to `Engine` and a row to `ACTIONS`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from tests.simulation.engine import Engine
from tests.simulation.memory import Finding
from tests.simulation.setting import Parts

STEPS = 400
# Jobs in flight at one time; each takes a few frames of the stack.
DEPTH_MAX = 5
# Rounds until all work is complete: far more than a correct cache needs.
DRAIN_ROUNDS_MAX = 400
# Limit for the slices of a snapshot, half a millisecond each.
SNAPSHOT_POLLS_MAX = 1000


class Simulation(Engine):
    """See the module's docstring. `run` raises Finding."""

    def __init__(self, seed: int, parts: Parts | None = None) -> None:
        super().__init__(seed, parts or Parts())
        self.trace: deque[str] = deque(maxlen=60)
        self._steps_left = STEPS
        self._depth = 0
        self._weights = list(
            accumulate(action.weight * (1 if action.core else self.random.choice(SWARM)) for action in ACTIONS)
        )
        if parts is not None and parts.hints:
            self._weights[-1] += HINT_WEIGHT

    def run(self) -> None:
        """Run all steps, then let all work complete. Raises Finding."""
        while self._steps_left > 0:
            self.step()
        if self.random.random() < 0.1:
            self._guarded("close", self._close)
            return
        self._guarded("settle", self._settle)

    def step(self) -> None:
        """Run one action, then all checks."""
        if self._steps_left <= 0:
            return
        self._steps_left -= 1
        action = self.random.choices(ACTIONS, cum_weights=self._weights)[0]
        self._guarded(action.name, partial(action.do, self), check=not action.world)

    def _guarded(self, name: str, do: Callable[[], None], *, check: bool = True) -> None:
        """Run one action, then the checks. Exceptions become findings, so that a worker below does not catch them."""
        self.trace.append(f"{'  ' * self._depth}{name}")
        try:
            do()
            if check:
                self.cache.check()
                self.auditor.pinned()
            self.auditor.memory()
        except AssertionError as error:
            raise Finding("invariant", str(error)) from error
        except Exception as error:
            raise Finding("crash", f"{type(error).__name__}: {error}") from error

    def elsewhere(self) -> None:
        chance = self.random.random()
        if chance < 0.5:
            return
        if self.alone:
            self.copies.glance()
            return
        count = self.random.randint(1, 5)
        if chance > 0.97:  # the job hangs
            count = 30
            self.clock.time_s += self.random.choice([0.1, 4.0, 100.0])
        self._depth += 1
        for _ in range(count):
            self.step()
        self._depth -= 1

    def work(self) -> None:
        if self._depth < DEPTH_MAX:
            super().work()

    # The end

    def _settle(self) -> None:
        """Let all work complete, then check that nothing is left."""
        self.cache._hints._timers.advance(math.inf)  # prefetches that are due later start now
        for _ in range(DRAIN_ROUNDS_MAX):
            if self._is_at_rest():
                break
            for action in _SETTLING:
                self._guarded(f"settle: {action.name}", partial(action.do, self), check=not action.world)
        else:
            counts = f"{len(self.waiting)} requests wait, {len(self.running)} run"
            raise Finding("stuck", f"{counts}, {self.cache.statistics()}")
        for pin, _ in self.auditor.pins:
            pin.release()
        self.cache._pins.clear()  # those of hints
        if not self.copies.failed:
            self.auditor.device()
            self.auditor.at_rest()
            self.auditor.stored(self.stores.of(self.epoch).known if self.cache.storage.attached else set())
            self._require_followed()
            self.auditor.emptied()
            self._require_followed()
        self._close()

    def _is_at_rest(self) -> bool:
        """True if no request waits or runs, no operation is in flight, and only the store of this epoch is open."""
        if self.waiting or self.running or not (self.controller.idle and self.device.stream.fence().query()):
            return False
        if self.cache._hints._fetches:  # their pages are held
            return False
        if any(group.queued for group in self.workers):  # such as a report of uses, which is not an operation
            return False
        users = sum(server.users for server in self.servers)
        return users == self.cache.storage.attached == (self.controller.backend is not None)

    def _require_followed(self) -> None:
        if self.follower is None:
            return
        for _ in range(SNAPSHOT_POLLS_MAX):
            if self.follower.compare():
                return
            self.cache.poll()
        raise Finding("events", "a requested snapshot did not come")

    def _close(self) -> None:
        """Close the cache; operations may be in flight."""
        self.alone = True
        if not self.cache.close(0.0):
            raise Finding("stuck", "close returned False, although all workers and copies have ended")
        if users := sum(server.users for server in self.servers):
            raise Finding("left behind", f"{users} stores are open after close")


class Action(NamedTuple):
    """A row of the table. `weight` is its frequency relative to the sum of all weights.

    A `core` action is needed in every seed; others have their usual frequency in some seeds, are frequent in some and
    missing in some. A `world` action does not call the cache, so only the memory is checked after it.
    """

    name: str
    weight: float
    do: Callable[[Simulation], None]
    core: bool = False
    world: bool = False


ACTIONS = [
    Action("arrive", 14, Simulation.arrive, core=True),
    Action("admit", 18, Simulation.admit, core=True),
    Action("forward", 16, Simulation.forward, core=True),
    Action("load early", 3, Simulation.load_early),
    Action("share", 2, Simulation.share),
    Action("decode", 4, Simulation.decode),
    Action("finish", 16, Simulation.finish, core=True),
    Action("abort running", 3, Simulation.abort_running),
    Action("abort waiting", 3, Simulation.abort_waiting),
    Action("interrupt", 3, Simulation.interrupt),
    Action("match", 3, Simulation.match),
    Action("insert", 2, Simulation.insert),
    Action("evict", 12, Simulation.evict),
    Action("pin", 2, Simulation.pin),
    Action("unpin", 1, Simulation.unpin),
    Action("clear", 0.2, Simulation.clear),
    Action("update weights", 0.8, Simulation.update_weights),
    Action("follow", 2, Simulation.follow),
    Action("poll", 20, Simulation.poll, core=True),
    Action("copy", 12, Simulation.copy, core=True, world=True),
    Action("work", 22, Simulation.work, core=True, world=True),
    Action("wait a while", 4, Simulation.wait_a_while, core=True, world=True),
    Action("others store", 8, Simulation.others_store, world=True),
    Action("harm store", 1, Simulation.harm_store, world=True),
    Action("switch storage", 0.5, Simulation.switch_storage),
    Action("hint", 0, Simulation.hint, core=True),  # only with `Parts.hints`
]
HINT_WEIGHT = 25
# Seeds that differ in which actions are frequent or missing reach more states than equal ones (Groce et al., "Swarm
# testing", ISSTA 2012).
SWARM = (0, 1, 1, 3)
# One round of settling. Its forward also launches loads for which no request waits.
_SETTLING = [
    action
    for action in ACTIONS
    if action.name in ("admit", "forward", "finish", "poll", "copy", "work", "wait a while")
]

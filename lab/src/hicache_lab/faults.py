"""A driver that makes another one slow, unreliable, damaging or hanging, to see what a failing store does.

A test wraps the driver of a store: `Store(FaultyDriver(driver, FaultOptions(latency=0.1)), codec)`. A configuration
uses the type `faulty`, whose options are the faults and the store to be spoiled:

    storage: {type: faulty, options: {latency: 20ms, storage: {type: file, options: {path: /mnt/nvme/hicache}}}}

Locking design: one condition guards the random numbers, the bandwidth and the switch for hanging. It is not held while
the driver works or during a delay.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pydantic import Field

from hicache.backends.base import GetOutcome, StoredPage, Usage
from hicache.backends.driver import Answer, Driver
from hicache.backends.errors import StoreError
from hicache.backends.pages import PageReads, PageWrites
from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.store import Store
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config.section import Section
from hicache.config.storage import StorageConfig
from hicache.errors import InvalidInput
from hicache.frame import HEADER_BYTES, FrameCodec
from hicache.units import Count, Duration, Number, Size

INJECTED = "injected"  # the kind of injected errors, and the reason of injected damage
# Optional functions of a driver that call its store. Their last argument is the deadline.
_CALLS = frozenset({"find_prefix", "touch", "clear"})


class FaultOptions(Section):
    """The faults of one store."""

    latency: Duration = Field(default=0.0, description="Time added to each call.")
    jitter: Duration = Field(default=0.0, description="Random time up to this, added to each call.")
    bandwidth: Size = Field(default=0, description="Bytes per second for all calls together; 0: no limit.")
    error_share: Number = Field(default=0.0, ge=0, le=1, description="Share of the calls that fail.")
    damage_share: Number = Field(
        default=0.0, ge=0, le=1, description="Share of the read pages that are damaged in flight, and removed."
    )
    seed: Count = Field(default=0, description="Seed of the random numbers; equal seeds give equal faults.")


class FaultyOptions(FaultOptions):
    """The options of the type `faulty`."""

    storage: StorageConfig = Field(description="The store to be spoiled; not a composition, whose parts can be.")


class FaultyDriver:
    """`driver` with faults. It has the optional abilities of `driver`. `close` replaces the driver's own.

    Delays end at the deadline, errors are values, damaged pages are removed. Only `hang` breaks the contract of a
    driver deliberately: calls then block until `release`, beyond their deadline. Usage is measured without faults.
    """

    def __new__(cls, driver: Driver[Any], *_: object, **__: object) -> FaultyDriver:
        """Return an object of a class that also has the other public names of `driver`: isinstance of a protocol looks
        them up."""
        others = {*dir(driver)} - {*dir(cls), "driver", "options", "hung_calls"}
        forwarded = {name: _forwarded(name) for name in others if not name.startswith("_")}
        return super().__new__(type(cls.__name__, (cls,), forwarded))

    def __init__(
        self, driver: Driver[Any], options: FaultOptions | None = None, clock: Clock = SYSTEM_CLOCK,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.driver = driver
        self.options = options or FaultOptions()
        self.hung_calls = 0  # calls that hang now
        self._clock = clock
        self._close = close or driver.close
        self._state = threading.Condition()
        self._dice = random.Random(self.options.seed)
        self._hanging = self._failing = False
        self._free_at = -math.inf  # the time when all bytes so far have been transferred

    # Faults on request

    def hang(self) -> None:
        """Make calls hang from now on."""
        with self._state:
            self._hanging = True

    def release(self) -> None:
        """Continue the calls that hang, and stop making calls hang."""
        with self._state:
            self._hanging = False
            self._state.notify_all()

    def fail(self, failing: bool = True) -> None:
        """Make every call fail from now on; with False, only those of `error_share`."""
        with self._state:
            self._failing = failing

    def reach(self, size_bytes: int, deadline: float) -> None:
        """Wait for the delay of a call that moves so many bytes. Raises StoreError for a call that fails."""
        options = self.options
        with self._state:
            delay_s = options.latency + options.jitter * self._dice.random()
            fails = self._failing or self._dice.random() < options.error_share
            time_s = self._clock()
            if options.bandwidth:
                self._free_at = max(self._free_at, time_s) + size_bytes / options.bandwidth
                delay_s += self._free_at - time_s
            self.hung_calls += 1
            self._state.wait_for(lambda: not self._hanging)
            self.hung_calls -= 1
        # Not a wait on the condition: `release` must not shorten the delay.
        if delay_s:
            self._clock.sleep(min(delay_s, deadline - time_s))
        if fails or self._clock() >= deadline:
            raise StoreError(INJECTED)

    # The driver

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> Iterable[Answer]:
        """See Driver."""
        self.reach(0, deadline)
        return self.driver.find(namespace, keys, deadline)

    def read(self, pages: PageReads[Any]) -> None:
        """See Driver. Flips a bit of some pages, as a bad cable might; a codec without a tag accepts them."""
        codec = pages.codec
        self.reach(len(pages) * codec.frame_bytes, pages.deadline)
        self.driver.read(pages)
        for position, page in enumerate(pages.pages):
            if pages.outcome(position) is not GetOutcome.HIT or not self._draws_damage():
                continue
            payload = page[HEADER_BYTES:] if isinstance(page, memoryview) else next(filter(len, page.parts))
            payload[0] ^= 1
            if codec.accept(pages.keys[position], page, codec.frame_bytes) is not None:
                pages.damage(position, INJECTED, INJECTED)

    def _draws_damage(self) -> bool:
        with self._state:
            return self._dice.random() < self.options.damage_share

    def write(self, pages: PageWrites) -> None:
        """See Driver."""
        self.reach(len(pages) * pages.codec.frame_bytes, pages.deadline)
        self.driver.write(pages)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[Any] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver. Removals of damaged pages do not fail."""
        if found is None:
            self.reach(0, deadline)
            return self.driver.remove(namespace, keys, deadline)
        damaged = [key for key, one in zip(keys, found, strict=True) if one is INJECTED]
        removed, kinds = self.driver.remove(namespace, damaged, deadline) if damaged else (0, ())
        others = {key: one for key, one in zip(keys, found, strict=True) if one is not INJECTED}
        if others:
            count, more = self.driver.remove(namespace, [*others], deadline, [*others.values()])
            removed, kinds = removed + count, [*kinds, *more]
        return removed, kinds

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver."""
        self.reach(0, deadline)
        return self.driver.pages(namespace, deadline)

    def measure(self) -> Usage:
        """See Driver."""
        return self.driver.measure()

    def close(self) -> None:
        """See Driver."""
        self._close()


def _forwarded(name: str) -> property:
    def call(driver: FaultyDriver, *arguments: Any) -> Any:
        driver.reach(0, arguments[-1])
        return getattr(driver.driver, name)(*arguments)

    def look(driver: FaultyDriver) -> Any:
        return functools.partial(call, driver) if name in _CALLS else getattr(driver.driver, name)

    return property(look)


def spoiled(storage: dict[str, Any], **faults: Any) -> dict[str, Any]:
    """Return the section `storage` of a configuration with these faults."""
    return {"type": "faulty", "options": {"storage": storage, **faults}}


def open_faulty(codec: FrameCodec, options: FaultyOptions, clock: Clock = SYSTEM_CLOCK) -> FaultyDriver:
    """Open storage of the type `faulty`. A `max_age` and a `capacity` that its shell enforces are only swept. Raises
    InvalidInput for a composition, and as opening the store does."""
    store = open_spec(BackendSpec.of(options.storage), codec, clock)
    if not isinstance(store, Store):
        store.close()
        raise InvalidInput("faulty: storage is a composition; use the type `faulty` for its parts instead")
    return FaultyDriver(store.driver, options, clock, store.close)

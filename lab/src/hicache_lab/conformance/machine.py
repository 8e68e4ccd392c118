"""A hypothesis state machine that applies the same steps to storage and to the memory driver, which is assumed to be
correct, and compares all results."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from hicache.backends.memory import MemoryDriver
from hicache.frame import HEADER_BYTES, FrameCodec
from hicache_lab.clocks import ManualClock

from .pages import (
    NAMESPACE,
    PAYLOAD_BYTES,
    OpenStore,
    bare,
    delete,
    exists,
    load,
    make_keys,
    memory_subject,
    store_chain,
)

_CHAINS = {name: make_keys(6, name) for name in ("left", "right")}
_STEPS = 25

_chains = st.sampled_from(sorted(_CHAINS))
_firsts = st.integers(0, 5)
_counts = st.integers(1, 6)


class StorageMachine(RuleBasedStateMachine):
    """State machine of stores, reads, lookups, deletions, damage and reopening. Each walk ends with an empty store.

    Invariant: the store holds the same bytes under the same keys as the model.
    """

    def __init__(self, open_store: OpenStore, *, reopens: bool, damages: bool) -> None:
        super().__init__()
        # Its time stands still, so that store and model have the same bytes.
        self._codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, clock=ManualClock())
        self._open_store = open_store
        self._reopens = reopens
        self._damages = damages
        self._store = open_store(self._codec)
        memory = MemoryDriver()
        self._model = memory_subject(bare(memory, self._codec), memory)

    @rule(chain=_chains, first=_firsts, count=_counts)
    def store(self, chain: str, first: int, count: int) -> None:
        """Store a run of a chain, with the page before it as parent."""
        keys, parent = _CHAINS[chain][first : first + count], _CHAINS[chain][first - 1] if first else None
        assert store_chain(self._store, keys, parent) == store_chain(self._model, keys, parent)

    @rule(chain=_chains, first=_firsts, count=_counts)
    def read(self, chain: str, first: int, count: int) -> None:
        """Read a run of a chain; compare hits byte by byte."""
        keys = _CHAINS[chain][first : first + count]
        assert load(self._store, keys) == load(self._model, keys)

    @rule(chain=_chains, first=_firsts)
    def look_up(self, chain: str, first: int) -> None:
        """Look up the rest of a chain from any page on."""
        assert exists(self._store, _CHAINS[chain][first:]) == exists(self._model, _CHAINS[chain][first:])

    @rule(chain=_chains, positions=st.lists(_firsts, max_size=6))
    def delete(self, chain: str, positions: list[int]) -> None:
        """Delete any pages of a chain, some of them twice."""
        keys = [_CHAINS[chain][position] for position in positions]
        assert delete(self._store, keys) == delete(self._model, keys)

    @precondition(lambda self: self._damages)
    @rule(chain=_chains, first=_firsts, offset=st.integers(0, HEADER_BYTES + PAYLOAD_BYTES - 1), bit=st.integers(0, 7))
    def flip_a_bit(self, chain: str, first: int, offset: int, bit: int) -> None:
        """Flip a bit of a stored page; the next reader must detect it."""
        raw = self._store.read(_CHAINS[chain][first])
        assert raw == self._model.read(_CHAINS[chain][first])
        if raw is None:
            return
        damaged = bytearray(raw)
        damaged[offset] ^= 1 << bit
        for side in (self._store, self._model):
            side.write(_CHAINS[chain][first], bytes(damaged))

    @precondition(lambda self: self._damages)
    @rule(chain=_chains, first=_firsts, length=st.integers(0, 3 * (HEADER_BYTES + PAYLOAD_BYTES)))
    def resize_and_read(self, chain: str, first: int, length: int) -> None:
        """Truncate or extend a page and read it at once: a store may detect the damage by the size alone."""
        raw = self._store.read(_CHAINS[chain][first])
        if raw is None:
            return
        for side in (self._store, self._model):
            side.write(_CHAINS[chain][first], raw[:length].ljust(length, b"\0"))
        assert load(self._store, [_CHAINS[chain][first]]) == load(self._model, [_CHAINS[chain][first]])
        assert self._store.read(_CHAINS[chain][first]) == self._model.read(_CHAINS[chain][first])

    @rule()
    def use(self) -> None:
        """Compare the usage."""
        found, model = self._store.backend.usage(), self._model.backend.usage()
        assert (found.pages, found.bytes) == (model.pages, model.bytes)

    @precondition(lambda self: self._reopens)
    @rule()
    def reopen(self) -> None:
        """Close the storage and open the store again."""
        self._store.backend.close()
        self._store = self._open_store(self._codec)

    def teardown(self) -> None:
        """Empty the store for the next walk."""
        for keys in _CHAINS.values():
            delete(self._store, keys)
        self._store.backend.close()


def run_machine(
    open_store: OpenStore, *, examples: int, reopens: bool, damages: bool = True, shortest: bool = True
) -> None:
    """Walk `examples` times, the same walks each time; if SOAK_FACTOR is set, that many times as often, at random.

    `reopens` is for stores that outlive their driver, `damages` for stores that read each page from where `Subject`
    writes it. Raises AssertionError with the shortest failing walk, or with the first one if not `shortest`.
    """
    class Walk(StorageMachine):
        def __init__(self) -> None:
            super().__init__(open_store, reopens=reopens, damages=damages)

    factor = int(os.environ.get("SOAK_FACTOR", "1"))
    run_state_machine_as_test(Walk, settings=settings(
        max_examples=examples * factor, stateful_step_count=_STEPS, derandomize=factor == 1, database=None,
        deadline=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, *([Phase.shrink] if shortest else [])],
    ))

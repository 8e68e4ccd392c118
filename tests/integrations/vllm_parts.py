"""The parts of `vllm_driver`: requests, the block pool, and workers whose copies can be held."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.errors import TransferError
from hicache.integrations.vllm.jobs import Report, Step
from hicache.integrations.vllm.worker import Collected, WorkerSide
from tests.waiting import WAIT_S

BLOCK = 4
LAYERS, REGIONS, SLOT = 2, 2, 4
PARTS_MAX = 2


class Gate:
    """A fence for copies. They wait until `open`; with `fails` they then fail."""

    def __init__(self, *, held: bool, fails: bool) -> None:
        self._open, self._fails = threading.Event(), fails
        self.held = held
        if not held:
            self._open.set()

    def query(self) -> bool:
        return self._open.is_set()

    def synchronize(self) -> None:
        assert self._open.wait(WAIT_S)
        if self._fails:
            raise TransferError("planted by the test")

    def open(self) -> None:
        self.held = False
        self._open.set()


class Worker(WorkerSide):
    """A WorkerSide whose copies can be held, or fail. A flush waits for the saves, so it first releases held ones, and
    a drain for all copies."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gates: dict[str, list[Gate]] = {"load": [], "save": []}
        self.held: set[str] = set()
        self.failing: set[str] = set()
        self._kind, self._fails_now = "", False

    def start_loads(self, step: Step) -> None:
        self._kind = "" if step.layerwise else "load"  # a forward that waits for the load would hang
        self._fails_now = "load" in self.failing
        super().start_loads(step)

    def start_saves(self, step: Step) -> None:
        self._kind, self._fails_now = "save", "save" in self.failing
        super().start_saves(step)

    def flush(self, step: Step) -> None:
        if step.flush:
            self.release("save")
        super().flush(step)

    def drain(self) -> None:
        for kind in self.gates:
            self.release(kind)
        super().drain()

    def release(self, kind: str) -> None:
        for gate in self.gates[kind]:
            gate.open()
        self.gates[kind].clear()

    def settle(self) -> None:
        """Wait for the loads if none is held, and for the saves if none is held."""
        for kind, copies in (("load", self._loads), ("save", self._saves)):
            if not self.gates[kind]:
                for copy in copies.values():
                    assert copy.transfer is None or copy.transfer.wait(WAIT_S)

    def _fence(self) -> Gate:
        gate = Gate(held=self._kind in self.held, fails=self._fails_now)
        if gate.held:
            self.gates[self._kind].append(gate)
        return gate


@dataclass(eq=False)
class Request:
    """A request. `tokens` are the prompt and the answer; the first `known` are given or already sampled."""

    request_id: str
    tokens: list[int]
    known: int
    salt: str = ""
    adapter: str | None = None
    identified: bool = True  # otherwise a test sets the result of `identity`
    skip_reading_prefix_cache: bool = False
    trace_headers: Mapping[str, str] | None = None
    kv_hints: object = None
    kv_transfer_params: Mapping[str, Any] | None = None
    num_computed_tokens: int = 0
    status: str = "waiting"  # loading, running, finished
    blocks: list[int] = field(default_factory=list)
    block_hashes: Sequence[bytes] = ()
    placeholders: int = 0
    in_flight: int = 0
    stale: int = 0
    deferred: list[int] = field(default_factory=list)
    matched: int = 0  # total of tokens that the connector has loaded
    aborted: bool = False

    def __post_init__(self) -> None:
        self.cache_salt = self.salt or None
        self._kv: dict[int, Any] = {}
        self.identity: Future[str] | None = None if self.adapter is None else Future()
        if self.identity is not None and self.identified:
            self.identity.set_result(str(self.adapter))
        self.hash_blocks()

    @property
    def num_tokens(self) -> int:
        return self.known

    def hash_blocks(self) -> None:
        while (len(self.block_hashes) + 1) * BLOCK <= self.known:
            begin = len(self.block_hashes) * BLOCK
            parent = self.block_hashes[-1] if begin else self.salt.encode()
            name = (self.adapter or "").split()[:1]
            part = repr((parent, name, self.tokens[begin : begin + BLOCK])).encode()
            self.block_hashes = (*self.block_hashes, hashlib.sha256(part).digest())

    def kv(self, weights: int) -> Any:
        """Return the correct KV of the tokens: `[tokens, part, layer, region, SLOT]`."""
        if weights not in self._kv:
            rows, state = [], repr((weights, self.salt, self.adapter)).encode()
            for token in self.tokens:
                state = hashlib.sha256(state + token.to_bytes(4, "little")).digest()
                rows.append(hashlib.blake2b(state, digest_size=PARTS_MAX * LAYERS * REGIONS * SLOT).digest())
            values = np.frombuffer(b"".join(rows), np.uint8)
            self._kv[weights] = values.reshape(len(rows), PARTS_MAX, LAYERS, REGIONS, SLOT)
        return self._kv[weights]


class Blocks:
    """vLLM's block pool. Free blocks keep their content and are found by its hash until they are allocated again."""

    def __init__(self, count: int) -> None:
        self.free = deque(range(1, count))
        self.refs = [0] * count
        self.by_hash: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            self.refs[block] = 1
            if block in self.hash_of:
                del self.by_hash[self.hash_of.pop(block)]
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        for block in reversed(list(blocks)):
            self.refs[block] -= 1
            assert self.refs[block] >= 0, f"block {block} is freed twice"
            if not self.refs[block]:
                self.free.append(block)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        for name in hashes:
            if name not in self.by_hash:
                break
            found.append(self.by_hash[name])
        return found

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1

    def remember(self, request: Request, tokens: int) -> None:
        for block, name in zip(request.blocks[: tokens // BLOCK], request.block_hashes, strict=False):
            if name not in self.by_hash and block not in self.hash_of:
                self.by_hash[name], self.hash_of[block] = block, name


class Row(NamedTuple):
    """A request in a step: computes `tokens` tokens from `begin` on; the first `right` of them are correct."""

    request: Request
    blocks: list[int]
    begin: int
    right: int
    tokens: int


class ShiftedClock(Clock):
    """The system's clock with a monotonic time that a test shifts; waits are not shifted."""

    shift_s = 0.0

    def __call__(self) -> float:
        return super().__call__() + self.shift_s


@dataclass(frozen=True)
class Form:
    """The parameters of an engine. `batches` in flight: 2 is asynchronous scheduling. `drafts`: tokens of speculative
    decoding. `budget`: tokens of a step. `caching`: vLLM's own prefix cache is on. `event_bytes` bounds the stream of
    events."""

    blocks: int = 64
    pages: int = 64
    page_blocks: int = 1
    ranks: int = 1
    replicas: int = 1
    layerwise: bool = False
    batches: int = 1
    drafts: int = 0
    budget: int = 64
    caching: bool = True
    event_bytes: int = 1 << 26
    clock: Clock = SYSTEM_CLOCK
    max_age: str | None = None  # of stored pages


@dataclass(eq=False)
class Scheduled:
    """A step as the workers get it: for each request its blocks, its first position and its number of tokens."""

    num_scheduled_tokens: Mapping[str, int]
    preempted_req_ids: set[str] | None
    rows: list[Row]
    step: Step


@dataclass(frozen=True, eq=False)
class Done:
    """The results of all workers for a step, merged as vLLM does."""

    scheduled: Scheduled
    report: Report | None
    collected: list[Collected]

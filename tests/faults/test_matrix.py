"""Every verb on every real server under every fault: the store may lose pages, and nothing else may happen.

A cell is one verb of one backend under one fault. In each cell, the verb raises nothing, returns outcomes of the
contract, serves no wrong page, and does not touch frames after it has returned. Afterwards the server holds only whole
pages. Also for each fault: a guard stops calls to the store during the fault, and uses the store again afterwards.
The number of cells is pairs of a store and a fault, times the verbs; the last test counts them. Valkey meets every
fault. S3 and the older Redis meet one fault of each kind, and every fault with `SOAK_FACTOR`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from hicache.backends.base import Direction as Way
from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.guard import Override
from hicache.backends.storage import Storage
from hicache.backends.store import Store
from hicache_lab.conformance import empty_frames, full_frames, holds, make_keys, soon
from hicache_lab.devservers import DevServer, DevService
from tests.faults.stores import CODEC, KINDS, PATIENCE_S, QUICK, TIMEOUT_S, Hurt, Kind
from tests.proxy import Direction, Faults, Proxy
from tests.seeds import IS_SOAK
from tests.waiting import wait_for

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
STORED, PRESENT = SetOutcome.STORED, SetOutcome.PRESENT
UP, DOWN, BOTH = Direction.UP, Direction.DOWN, Direction.BOTH
HALF_A_PAGE = CODEC.frame_bytes // 2
A_BYTE = b"\xa5"
VERBS = ("exists", "get", "set", "delete")
# The deadline, in seconds, of verbs that are expected to fail.
DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class Row:
    """A fault. `bears`: the store is slow but works. `closes`: the directions that fail; a fault in the middle of a
    body does not affect small requests and replies."""

    name: str
    faults: Faults
    bears: bool = False
    closes: tuple[Way, ...] = (Way.READ, Way.WRITE)
    begin: Callable[[DevServer], object] = lambda server: None
    end: Callable[[DevServer], object] = lambda server: None
    ends_server: bool = False


def _reset(after_bytes: int, direction: Direction) -> Faults:
    return Faults(cut_after_bytes=after_bytes, reset=True, direction=direction)


ROWS = (
    Row("latency", Faults(latency_s=0.02), bears=True),
    Row("bandwidth", Faults(bytes_per_s=100e6), bears=True),
    Row("slices", Faults(slice_bytes=8191), bears=True),
    Row("stall up", Faults(stall=UP)),
    Row("stall down", Faults(stall=DOWN)),
    Row("stall both", Faults(stall=BOTH)),
    Row("cut at once", Faults(cut_after_bytes=0, direction=DOWN)),
    Row("cut in the header", Faults(cut_after_bytes=3, direction=DOWN)),
    Row("cut in the request", Faults(cut_after_bytes=20, direction=UP)),
    Row("cut in the body read", Faults(cut_after_bytes=HALF_A_PAGE, direction=DOWN), closes=(Way.READ,)),
    Row("cut in the body written", Faults(cut_after_bytes=HALF_A_PAGE, direction=UP), closes=(Way.WRITE,)),
    Row("reset in the header", _reset(3, DOWN)),
    Row("reset in the body read", _reset(HALF_A_PAGE, DOWN), closes=(Way.READ,)),
    Row("reset in the body written", _reset(HALF_A_PAGE, UP), closes=(Way.WRITE,)),
    Row("refused", Faults(refuse=True)),
    Row("stopped", Faults(), begin=DevServer.pause, end=DevServer.resume),
    Row("killed", Faults(), begin=DevServer.kill, end=DevServer.restart, ends_server=True),
)
# The rows of a store whose client or reaction another one shares: one of each kind of fault.
SAMPLES = {
    "redis": {"stall down", "killed"},
    "s3": {"latency", "stall down", "cut in the body read", "reset in the body written", "refused", "killed"},
}
ALL_PAIRS = [(kind, row) for kind in KINDS for row in ROWS]
PAIRS = [
    (kind, row) for kind, row in ALL_PAIRS
    if IS_SOAK or row.name in SAMPLES.get(kind.name, {row.name})
]


@pytest.fixture(scope="module")
def hurt(request: pytest.FixtureRequest) -> Iterator[Hurt]:
    """The server of one kind, to which the tests of this module apply faults."""
    kind: Kind = request.param
    with kind.server() as server, Proxy(server.port) as proxy:
        yield Hurt(kind, server, proxy)


@pytest.fixture
def logged_in(hurt: Hurt, login: Callable[[DevService], None]) -> None:
    """Put the server's credentials into the environment."""
    login(hurt.server)


class Cells:
    """Runs the verbs under a fault and checks them. Some pages are stored before the fault, some are new."""

    def __init__(self, row: Row, far: Storage, near: Storage) -> None:
        self.far = far
        self.near = near
        self.row = row
        self.stored = make_keys(3, f"stored {row.name}")
        self.new = make_keys(3, f"new {row.name}")
        self.lent: list[tuple[memoryview, bytes]] = []
        near.delete([*self.stored, *self.new], deadline=soon())
        outcomes = near.batch_set(self.stored, full_frames(CODEC, self.stored), parent=None, deadline=soon())
        assert outcomes == [STORED] * 3

    def run(self, verb: str) -> None:
        """Run one cell. The verbs run in the order of `VERBS`."""
        bears, deadline = self.row.bears, soon(PATIENCE_S if self.row.bears else DEADLINE_S)
        if verb == "exists":
            found = self.far.batch_exists(self.stored, deadline=deadline)
            assert found == 3 if bears else 0 <= found <= 3
        elif verb == "get":
            self._get(bears, deadline)
        elif verb == "set":
            frames = full_frames(CODEC, self.new)
            outcomes = self.far.batch_set(self.new, frames, parent=None, deadline=deadline)
            assert set(outcomes) <= ({STORED} if bears else {STORED, PRESENT, SetOutcome.ERROR})
            self._keep_watch(frames)
        else:
            removed = self.far.delete(self.stored[2:], deadline=deadline)
            assert removed == 1 if bears else 0 <= removed <= 1

    def _get(self, bears: bool, deadline: float) -> None:
        frames = empty_frames(CODEC, 3)
        outcomes = self.far.batch_get(self.stored, frames, deadline=deadline)
        assert set(outcomes) <= ({HIT} if bears else {HIT, GetOutcome.ERROR}), "a fault is neither a miss nor damage"
        for key, frame, outcome in zip(self.stored, frames, outcomes, strict=True):
            assert outcome is not HIT or holds(CODEC, key, frame), "a wrong page was served"
        self._keep_watch(frames)

    def _keep_watch(self, frames: list[memoryview]) -> None:
        """Fill the frames with known bytes, to detect later writes by the backend."""
        for frame in frames:
            frame[:] = A_BYTE * len(frame)
            self.lent.append((frame, A_BYTE * len(frame)))

    def check_after(self, *, keeps_pages: bool) -> None:
        """Check after the fault: frames are unchanged, and the server holds only whole pages; with `keeps_pages`, also
        all pages that were stored and not removed."""
        for frame, expected in self.lent:
            assert frame == expected, "a frame was written after its verb had returned"
        frames = empty_frames(CODEC, 6)
        outcomes = self.near.batch_get([*self.stored, *self.new], frames, deadline=soon())
        assert GetOutcome.CORRUPT not in outcomes, "half a page is stored"
        assert set(outcomes) <= {HIT, MISS}
        if keeps_pages:
            assert outcomes[:2] == [HIT, HIT]


@pytest.mark.usefixtures("logged_in")
@pytest.mark.parametrize(("hurt", "row"), PAIRS, ids=lambda of: of.name, indirect=["hurt"], scope="module")
def test_a_fault_costs_pages_and_nothing_else(hurt: Hurt, row: Row) -> None:
    timeout_s = PATIENCE_S if row.bears else TIMEOUT_S
    with hurt.near() as near, hurt.far(timeout_s=timeout_s) as far, hurt.far(guard=dict(QUICK)) as guarded:
        cells = Cells(row, far, near)
        # Its connections are open when the fault begins.
        wait_for(lambda: far.batch_exists(cells.stored, deadline=soon()) == 3)
        assert isinstance(guarded, Store)
        row.begin(hurt.server)
        hurt.proxy.set(row.faults)
        try:
            for verb in VERBS:
                cells.run(verb)
            if not row.bears:
                _hold_off(guarded, row, cells.stored[:2])
        finally:
            row.end(hurt.server)
            hurt.proxy.heal()
        cells.check_after(keeps_pages=hurt.kind.keeps_data or not row.ends_server)
        _works_again(cells, guarded)


def _hold_off(guarded: Store, row: Row, stored: list[bytes]) -> None:
    """Use the store until its guard is open in the directions that the fault affects."""
    new = make_keys(2, f"guarded {row.name}")

    def use() -> None:
        guarded.batch_get(stored, empty_frames(CODEC, 2), deadline=soon(1.0))
        guarded.batch_set(new, full_frames(CODEC, new), parent=None, deadline=soon(1.0))

    wait_for(lambda: not any(guarded.may_pass(way) for way in row.closes), use)
    guarded.check()


def _works_again(cells: Cells, guarded: Store) -> None:
    wait_for(lambda: guarded.may_pass(Way.READ) and guarded.may_pass(Way.WRITE))
    keys = make_keys(2, "after")
    cells.near.delete(keys, deadline=soon())
    for backend in (guarded, cells.far):
        # A client may find its pooled connections dead, one by one.
        wait_for(functools.partial(_stores, backend, keys))
        wait_for(functools.partial(_loads, backend, keys))


def _stores(backend: Storage, keys: list[bytes]) -> bool:
    outcomes = backend.batch_set(keys, full_frames(CODEC, keys), parent=None, deadline=soon())
    return all(outcome.is_stored for outcome in outcomes)


def _loads(backend: Storage, keys: list[bytes]) -> bool:
    frames = empty_frames(CODEC, len(keys))
    outcomes = backend.batch_get(keys, frames, deadline=soon())
    hits = [position for position, outcome in enumerate(outcomes) if outcome is HIT]
    assert all(holds(CODEC, keys[position], frames[position]) for position in hits)
    return len(hits) == len(keys)


@pytest.mark.usefixtures("logged_in")
@pytest.mark.parametrize("hurt", KINDS[:1], ids=lambda kind: kind.name, indirect=True)
@pytest.mark.parametrize("mode", [Override.AUTO, Override.ON])
def test_the_breaker_stops_calls_to_a_store_that_is_down(hurt: Hurt, mode: Override) -> None:
    """Control: if the operator forces it on, every call still reaches the store."""
    keys = make_keys(2, "control")

    def read() -> None:
        guarded.batch_get(keys, empty_frames(CODEC, 2), deadline=soon(1.0))

    # Long back-offs, so that no probe occurs during the test.
    with hurt.far(guard={**QUICK, "backoff_min": 60.0, "backoff_max": 60.0}) as guarded:
        assert isinstance(guarded, Store)
        hurt.proxy.set(Faults(stall=DOWN))
        try:
            wait_for(lambda: not guarded.may_pass(Way.READ), read)
            if mode is Override.ON:
                guarded.override(Way.READ, mode)
            before = hurt.proxy.bytes_up
            read()
            assert (hurt.proxy.bytes_up > before) is (mode is Override.ON)
        finally:
            hurt.proxy.heal()


def test_the_matrix_has_every_fault_and_in_a_soak_two_hundred_cells() -> None:
    print(f"{len(PAIRS)} of {len(ALL_PAIRS)} pairs of a store and a fault, {len(VERBS)} verbs each")
    assert {row.name for _, row in PAIRS} == {row.name for row in ROWS} and len(PAIRS) >= 25
    assert len(ALL_PAIRS) * len(VERBS) >= 200

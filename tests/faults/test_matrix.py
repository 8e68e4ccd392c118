"""Every verb on every real server under every fault: the store may lose pages, and nothing else may happen.

A cell is one verb of one backend under one fault. In each, the verb raises nothing, answers with outcomes of the
contract, serves no wrong page, and leaves frames alone once it has returned; what the server holds afterwards is whole
pages only. For each fault besides: a guard in front leaves the store alone while it hurts, and uses it again when it is
healed. `COLUMNS x ROWS x VERBS` cells; the last test counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from hicache.backends.base import GetOutcome, SetOutcome, StorageBackend
from hicache.backends.guard import Direction as Way
from hicache.backends.guard import GuardedBackend, Override
from hicache.backends.testing import empty_frames, full_frames, holds, make_keys, soon
from hicache.devservers import DevService, SeaweedServer
from tests.faults.stores import CODEC, KINDS, QUICK, Hurt, Kind
from tests.proxy import Direction, Faults, Proxy
from tests.waiting import wait_for

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
STORED, PRESENT = SetOutcome.STORED, SetOutcome.PRESENT
UP, DOWN, BOTH = Direction.UP, Direction.DOWN, Direction.BOTH
HALF_A_PAGE = CODEC.frame_bytes // 2
A_BYTE = b"\xa5"
VERBS = ("exists", "get", "set", "delete")


@dataclass(frozen=True, slots=True)
class Row:
    """A fault. `bears`: the store is slow under it, and works. `closes`: the directions in which it does not, since a
    fault in the middle of a body leaves small requests and answers alone."""

    name: str
    faults: Faults
    bears: bool = False
    closes: tuple[Way, ...] = (Way.READ, Way.WRITE)
    to_server: Callable[[Hurt], None] | None = None
    heals_server: Callable[[Hurt], None] | None = None
    loses_pages: bool = False


def _pause(hurt: Hurt) -> None:
    hurt.server.pause()


def _resume(hurt: Hurt) -> None:
    hurt.server.resume()


def _kill(hurt: Hurt) -> None:
    hurt.server.kill()


def _restart(hurt: Hurt) -> None:
    hurt.server.restart()


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
    Row("stopped", Faults(), to_server=_pause, heals_server=_resume),
    Row("killed", Faults(), to_server=_kill, heals_server=_restart, loses_pages=True),
)


@pytest.fixture(scope="module")
def private_seaweed() -> Iterator[SeaweedServer]:
    """One S3 server for both of its clients: it takes many seconds to start."""
    with SeaweedServer() as server:
        yield server


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def hurt(request: pytest.FixtureRequest) -> Iterator[Hurt]:
    """The server of one column, to be hurt by the tests of this module."""
    kind: Kind = request.param
    if kind.server is SeaweedServer:
        server = request.getfixturevalue("private_seaweed")
        with Proxy(server.port) as proxy:
            yield Hurt(kind, server, proxy)
        return
    with kind.server() as server, Proxy(server.port) as proxy:
        yield Hurt(kind, server, proxy)


@pytest.fixture(autouse=True)
def logged_in(hurt: Hurt, login: Callable[[DevService], None]) -> None:
    """Credentials of the server in the environment."""
    login(hurt.server)


def _apply(hurt: Hurt, row: Row) -> None:
    if row.to_server is not None:
        row.to_server(hurt)
    hurt.proxy.set(row.faults)


def _heal(hurt: Hurt, row: Row) -> None:
    if row.heals_server is not None:
        row.heals_server(hurt)
    hurt.proxy.heal()


class Cells:
    """The verbs under a fault, and what they must not do. Pages: some are stored before, some are new."""

    def __init__(self, name: str, far: StorageBackend, near: StorageBackend) -> None:
        self.far = far
        self.near = near
        self.stored = make_keys(3, f"stored {name}")
        self.new = make_keys(3, f"new {name}")
        self.lent: list[tuple[memoryview, bytes]] = []
        near.delete([*self.stored, *self.new], deadline=soon())
        outcomes = near.batch_set(self.stored, full_frames(CODEC, self.stored), parent=None, deadline=soon())
        assert outcomes == [STORED] * 3

    def run(self, verb: str, row: Row) -> None:
        """One cell. The verbs run in the order of `VERBS`."""
        if verb == "exists":
            found = self.far.batch_exists(self.stored, deadline=soon(2.0))
            assert found == 3 if row.bears else 0 <= found <= 3
        elif verb == "get":
            self._get(row)
        elif verb == "set":
            frames = full_frames(CODEC, self.new)
            outcomes = self.far.batch_set(self.new, frames, parent=None, deadline=soon(2.0))
            assert set(outcomes) <= ({STORED} if row.bears else {STORED, PRESENT, SetOutcome.ERROR})
            self._keep_watch(frames)
        else:
            removed = self.far.delete(self.stored[2:], deadline=soon(2.0))
            assert removed == 1 if row.bears else 0 <= removed <= 1

    def _get(self, row: Row) -> None:
        frames = empty_frames(CODEC, 3)
        outcomes = self.far.batch_get(self.stored, frames, deadline=soon(2.0))
        assert set(outcomes) <= ({HIT} if row.bears else {HIT, GetOutcome.ERROR}), "a fault is not a miss, nor damage"
        for key, frame, outcome in zip(self.stored, frames, outcomes, strict=True):
            assert outcome is not HIT or holds(CODEC, key, frame), "a wrong page was served"
        self._keep_watch(frames)

    def _keep_watch(self, frames: list[memoryview]) -> None:
        """Give the frames to somebody else, who will notice if the backend still writes into them."""
        for frame in frames:
            frame[:] = A_BYTE * len(frame)
            self.lent.append((frame, A_BYTE * len(frame)))

    def check_after(self, row: Row) -> None:
        """With the fault gone: frames are as they were left, and the server holds whole pages or none."""
        for frame, expected in self.lent:
            assert frame == expected, "a frame was written after its verb had returned"
        frames = empty_frames(CODEC, 6)
        outcomes = self.near.batch_get([*self.stored, *self.new], frames, deadline=soon())
        assert set(outcomes) <= {HIT, MISS}, "half a page is stored"
        if not row.loses_pages:
            assert outcomes[:2] == [HIT, HIT]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_fault_costs_pages_and_nothing_else(hurt: Hurt, row: Row) -> None:
    with hurt.near() as near, hurt.far() as far, hurt.far(guard=dict(QUICK)) as guarded:
        cells = Cells(row.name, far, near)
        assert far.batch_exists(cells.stored, deadline=soon()) == 3  # its connections are open when the fault comes
        assert isinstance(guarded, GuardedBackend)
        _apply(hurt, row)
        try:
            for verb in VERBS:
                cells.run(verb, row)
            if not row.bears:
                _hold_off(guarded, row, cells.stored[:2])
        finally:
            _heal(hurt, row)
        cells.check_after(row)
        _works_again(cells, guarded)


def _hold_off(guarded: GuardedBackend, row: Row, stored: list[bytes]) -> None:
    """Use the store until its guard has had enough of what the fault touches."""
    new = make_keys(2, f"guarded {row.name}")

    def use() -> None:
        guarded.batch_get(stored, empty_frames(CODEC, 2), deadline=soon(1.0))
        guarded.batch_set(new, full_frames(CODEC, new), parent=None, deadline=soon(1.0))

    wait_for(lambda: not any(guarded.may_pass(way) for way in row.closes), use, timeout_s=20.0)
    guarded.check()


def _works_again(cells: Cells, guarded: GuardedBackend) -> None:
    wait_for(lambda: guarded.may_pass(Way.READ) and guarded.may_pass(Way.WRITE), timeout_s=20.0)
    keys = make_keys(2, "after")
    cells.near.delete(keys, deadline=soon())
    for backend in (guarded, cells.far):
        def store(backend: StorageBackend = backend) -> bool:
            outcomes = backend.batch_set(keys, full_frames(CODEC, keys), parent=None, deadline=soon())
            return all(outcome.is_stored for outcome in outcomes)

        wait_for(store)  # a client may find the connections that it has kept dead, one by one
        frames = empty_frames(CODEC, 2)
        assert backend.batch_get(keys, frames, deadline=soon()) == [HIT, HIT]
        assert all(holds(CODEC, key, frame) for key, frame in zip(keys, frames, strict=True))


@pytest.mark.parametrize("mode", [Override.AUTO, Override.ON])
def test_the_breaker_leaves_a_store_alone_that_is_down(hurt: Hurt, mode: Override) -> None:
    """And the control: switched on by its operator, every call goes to the store all the same."""
    keys = make_keys(2, "control")

    def read() -> None:
        guarded.batch_get(keys, empty_frames(CODEC, 2), deadline=soon(1.0))

    # No probe falls into the test.
    with hurt.far(guard={**QUICK, "backoff_min_s": 60.0, "backoff_max_s": 60.0}) as guarded:
        assert isinstance(guarded, GuardedBackend)
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


def test_the_matrix_has_two_hundred_cells() -> None:
    cells = len(KINDS) * len(ROWS) * len(VERBS)
    print(f"{len(KINDS)} stores x {len(ROWS)} faults x {len(VERBS)} verbs = {cells} cells")
    assert cells >= 200

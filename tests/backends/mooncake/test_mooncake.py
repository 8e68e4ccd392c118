"""The Mooncake backend passes the contract on a real master: moving its pages itself, and through a daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.backends.mooncake import MooncakeDriver
from hicache.backends.store import Store
from hicache_lab.conformance import DriverContract, OpenStore, SampleContract, Subject, driver_of, make_keys
from hicache_lab.devservers import MooncakeClientDaemon, MooncakeMaster

from .store import SideDoor, open_backend


@pytest.fixture(scope="module")
def daemon(master: MooncakeMaster) -> Iterator[MooncakeClientDaemon]:
    with MooncakeClientDaemon(master) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def at_daemon(master: MooncakeMaster, daemon: MooncakeClientDaemon) -> Iterator[Store]:
    """As `here`."""
    backend = open_backend(master, daemon=daemon.address)
    yield backend
    backend.close()


class TestMooncakeInThisProcess(DriverContract):
    tells_replaced = False
    machine_examples, churn_rounds = 10, 10

    @pytest.fixture
    def open_store(self, master: MooncakeMaster, here: Store, door: SideDoor) -> Iterator[OpenStore]:
        yield lambda codec: door.store(open_backend(master, codec))
        door.clear()

    def test_the_server_rejects_an_empty_object(self, store: Subject, door: SideDoor) -> None:
        assert isinstance(store.backend, Store)
        assert door.client.put(door.name(store.backend, make_keys(1)[0]), b"") != 0
        assert store.backend.usage().pages == 0


class TestMooncakeThroughADaemon(SampleContract):
    @pytest.fixture
    def open_store(
        self, master: MooncakeMaster, daemon: MooncakeClientDaemon, at_daemon: Store, door: SideDoor
    ) -> Iterator[OpenStore]:
        yield lambda codec: door.store(open_backend(master, codec, daemon=daemon.address))
        door.clear()

    def test_with_a_daemon_no_memory_is_registered(self, store: Subject) -> None:
        store.backend.register_memory(memoryview(bytearray(4096)))
        assert driver_of(store.backend, MooncakeDriver)._sessions.current.paths.registered == ()

"""The Mooncake backend passes the contract on a real master: moving its pages itself, and through a daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.backends.mooncake import MooncakeBackend
from hicache.backends.testing import DAMAGES, BackendContract, OpenStore, Store, make_keys
from hicache.lab.devservers import MooncakeClientDaemon, MooncakeMaster

from .store import SideDoor, open_backend


class _MooncakeContract(BackendContract):
    # The server rejects an empty object, so the backend cannot find one.
    @pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage != "empty"])
    def test_a_wrong_object_is_corrupt_and_removed(self, store: Store, damage: str) -> None:
        super().test_a_wrong_object_is_corrupt_and_removed(store, damage)

    def test_the_server_rejects_an_empty_object(self, store: Store, door: SideDoor) -> None:
        assert isinstance(store.backend, MooncakeBackend)
        assert door.client.put(door.name(store.backend, make_keys(1)[0]), b"") != 0
        assert store.backend.usage().pages == 0


@pytest.fixture(scope="module")
def daemon(master: MooncakeMaster) -> Iterator[MooncakeClientDaemon]:
    with MooncakeClientDaemon(master) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def at_daemon(master: MooncakeMaster, daemon: MooncakeClientDaemon) -> Iterator[MooncakeBackend]:
    """As `here`."""
    backend = open_backend(master, daemon=daemon.address)
    yield backend
    backend.close()


class TestMooncakeInThisProcess(_MooncakeContract):
    @pytest.fixture
    def open_store(self, master: MooncakeMaster, here: MooncakeBackend, door: SideDoor) -> Iterator[OpenStore]:
        yield lambda codec: door.store(open_backend(master, codec))
        door.clear()


class TestMooncakeThroughADaemon(_MooncakeContract):
    machine_examples = 6  # fewer than above, because only the path to the store differs

    @pytest.fixture
    def open_store(
        self, master: MooncakeMaster, daemon: MooncakeClientDaemon, at_daemon: MooncakeBackend, door: SideDoor
    ) -> Iterator[OpenStore]:
        yield lambda codec: door.store(open_backend(master, codec, daemon=daemon.address))
        door.clear()

    def test_with_a_daemon_no_memory_is_registered(self, store: Store) -> None:
        assert isinstance(store.backend, MooncakeBackend)
        store.backend.register_memory(memoryview(bytearray(4096)))
        assert store.backend._sessions.current.paths.registered == ()

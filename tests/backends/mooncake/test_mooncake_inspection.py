"""A Mooncake store as its operator sees it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from hicache.backends.base import StoredPage
from hicache.backends.errors import StoreError
from hicache.backends.mooncake import MooncakeDriver
from hicache.backends.mooncake.admin import Admin
from hicache.backends.registry import BackendSpec, open_stored
from hicache.backends.store import Store
from hicache.backends.stored import StoredPages
from hicache.config import MooncakeStorageOptions
from hicache.config.addresses import Address
from hicache.errors import BackendUnavailable, ConfigError
from hicache.units import MIB
from hicache_lab.conformance import (
    NAMESPACE,
    InspectionContract,
    OpenStore,
    OpenStored,
    driver_of,
    make_keys,
    soon,
)
from hicache_lab.devservers import MooncakeMaster
from hicache_lab.devservers.ports import LOOPBACK
from tests.listening import Listener

from .store import CODEC, SideDoor, open_backend, options_for, store


@pytest.fixture(scope="module")
def opened(master: MooncakeMaster, here: Store) -> Iterator[StoredPages]:
    """As `here`, for a client without a segment."""
    raw = StoredPages(MooncakeDriver(None, MooncakeStorageOptions(**options_for(master))), "mooncake")
    yield raw
    raw.close()


class TestMooncakeRaw(InspectionContract):
    tells_replaced = False

    @pytest.fixture
    def open_store(self, master: MooncakeMaster, here: Store, door: SideDoor) -> Iterator[OpenStore]:
        yield lambda codec: door.store(open_backend(master, codec))
        door.clear()

    @pytest.fixture
    def open_stored(self, master: MooncakeMaster, opened: StoredPages) -> OpenStored:
        return lambda: StoredPages(MooncakeDriver(None, MooncakeStorageOptions(**options_for(master))), "mooncake")


@pytest.fixture
def backend(here: Store, door: SideDoor) -> Iterator[Store]:
    yield here
    door.clear()


@pytest.fixture
def raw(opened: StoredPages, door: SideDoor) -> Iterator[StoredPages]:
    yield opened
    door.clear()


def test_a_long_listing_has_only_the_pages_of_the_prefix(
    raw: StoredPages, backend: Store, master: MooncakeMaster, door: SideDoor
) -> None:
    keys = make_keys(70)  # more than fit in one request
    store(backend, keys)
    prefixed = open_backend(master, prefix="a" + driver_of(backend, MooncakeDriver).options.prefix)
    store(prefixed, keys[:2])
    assert door.client.put("somebody's key", b"x") == 0
    assert door.client.put(f"{driver_of(backend, MooncakeDriver).options.prefix}not/a page", b"x") == 0
    assert set(raw.pages()) == {StoredPage(NAMESPACE, key, CODEC.frame_bytes, None) for key in keys}
    assert raw.remove(list(raw.pages())) == 70
    assert prefixed.batch_exists(keys, deadline=soon()) == 2
    prefixed.close()


def test_a_listing_grants_no_leases(
    raw: StoredPages, backend: Store, door: SideDoor
) -> None:
    """Control: a lookup through a client grants leases."""
    (key,) = make_keys(1)
    store(backend, [key])
    assert len(list(raw.pages())) == 1
    assert door.client.batch_remove([door.name(backend, key)]) == [0]
    store(backend, [key])
    assert door.client.get_size(door.name(backend, key)) == CODEC.frame_bytes
    assert door.client.batch_remove([door.name(backend, key)]) != [0]


def test_a_page_replaced_by_a_shorter_one_reads_as_missing(raw: StoredPages, backend: Store) -> None:
    (key,) = make_keys(1)
    store(backend, [key])
    assert raw.read(StoredPage(NAMESPACE, key, 10 * CODEC.frame_bytes, None), 1 << 20) is None
    assert raw.read(StoredPage(NAMESPACE, key, CODEC.frame_bytes, None), 0) == b""


def test_larger_pages_than_before_are_read_and_written(raw: StoredPages) -> None:
    for number, size in enumerate((4096, 3 * MIB, 8192)):
        page = StoredPage(NAMESPACE, make_keys(3)[number], size, None)
        assert raw.write(page, bytes([number]) * size, None)
        assert raw.read(page, size) == bytes([number]) * size


def test_a_full_store_accepts_no_more_pages(raw: StoredPages) -> None:
    page = StoredPage(NAMESPACE, make_keys(1)[0], 65 * MIB, None)
    assert not raw.write(page, bytes(65 * MIB), None)
    assert list(raw.pages()) == []


def test_without_the_masters_http_server_listing_gives_advice(master: MooncakeMaster) -> None:
    raw = open_stored(BackendSpec("mooncake", options_for(master, admin=master.address)))
    with pytest.raises(BackendUnavailable, match="set `admin` to its --metrics_host"):
        list(raw.pages())
    raw.close()


def test_a_cut_list_is_not_accepted() -> None:
    assert _asked("Content-Length: 4\r\n\r\none\n", Admin.all_keys) == ["one"], "the control"
    with pytest.raises(BackendUnavailable, match="4 bytes of a longer answer; try again"):
        _asked("Content-Length: 400\r\n\r\none\n", Admin.all_keys)


@pytest.mark.parametrize("body", [
    '{"data": ' + "[" * 100_000, '{"data": {"k": {"ok": true, "values": [{"size_": Infinity}]}}}',
    '{"data": {"k": {"ok": true, "values": "x"}}}', '{"data": []}', "\u0665", "",
])
def test_an_invalid_answer_about_sizes_is_a_typed_error(body: str) -> None:
    with pytest.raises(BackendUnavailable, match="unexpected answer"):
        _asked(f"Content-Length: {len(body.encode())}\r\n\r\n{body}")


@pytest.mark.parametrize("size", ["xyz", "-5", "\u0665"])
def test_invalid_http_chunks_are_a_typed_error(size: str) -> None:
    with pytest.raises(BackendUnavailable, match="does not answer"):
        _asked(f"Transfer-Encoding: chunked\r\n\r\n{size}\r\n")


def _asked(reply: str, ask: Callable[[Admin], object] = lambda admin: list(admin.sizes(["k"]))) -> object:
    """Return what `ask` finds in `reply`, after which the connection ends. Raises the operator's error, as a store
    does."""

    def serve(connection: socket.socket, number: int) -> None:
        connection.recv(4096)
        connection.sendall(f"HTTP/1.1 200 OK\r\n{reply}".encode())

    with Listener(serve) as server:
        try:
            return ask(Admin(Address(LOOPBACK, server.port)))
        except StoreError as error:
            raise BackendUnavailable(error.explanation) from error


def test_it_opens_by_name_and_refuses_wrong_options(master: MooncakeMaster, opened: StoredPages) -> None:
    raw = open_stored(BackendSpec("mooncake", options_for(master)))
    assert list(raw.pages()) == []
    raw.close()
    with pytest.raises(ConfigError, match=r"backend mooncake: .*prefix"):
        open_stored(BackendSpec("mooncake", options_for(master, prefix="*")))

"""The admin surface of a real daemon with engines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.frame import FrameCodec
from hicache_lab.devservers.ports import LOOPBACK
from tests.admin.ctl import Ctl
from tests.admin.daemons import ADMIN_TOKEN, DATA_TOKEN, PAYLOAD_BYTES, Daemon, keys_of
from tests.waiting import wait_for

pytestmark = pytest.mark.long
A, B = "aa" * 32, "bb" * 32
PAGE_POOL_BYTES = 32768  # two units of the pool


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def daemon(running: Daemon) -> Iterator[Daemon]:
    """The shared daemon. After each test, pins, quotas, overrides and pages are removed."""
    yield running
    for pin in running.admin("GET", "/pins"):
        running.admin("DELETE", f"/pins/{pin['id']}", code=204)
    for quota in running.admin("GET", "/quotas"):
        running.admin("PUT", "/quotas", {"namespace": quota["namespace"], "quota_bytes": None}, 204)
    running.admin("PUT", "/breakers", {"mode": "auto"}, 204)
    running.admin("POST", "/detach", {}, 204)  # this also empties the memory stores
    wait_for(lambda: running.admin("GET", "/status")["stores"] == [])
    running.admin("POST", "/attach", {}, 204)
    wait_for(lambda: all(stores_of(running, one) == {"ram", "disk"} for one in namespaces_of(running)))
    assert running.job("/clear", {"where": "all"})["state"] == "done"


def namespaces_of(daemon: Daemon) -> list[str]:
    """Return the open namespaces."""
    return [one["namespace"] for one in daemon.admin("GET", "/status")["namespaces"]]


def stores_of(daemon: Daemon, namespace: str) -> set[str]:
    """Return the open stores of a namespace."""
    return {one["name"] for one in daemon.admin("GET", "/status")["stores"] if one["namespace"] == namespace}


def filled(daemon: Daemon, namespace: int, pages: int = 4, *, first: int = 0) -> list[bytes]:
    """Store a chain of a namespace in the pool and in both stores. Return its keys."""
    keys = keys_of(pages, first=first)
    daemon.engine(namespace).store(keys)
    space = f"{namespace:02x}" * 32
    wait_for(lambda: daemon.places(keys, namespace=space) == [["pool", "ram", "disk"]] * pages)
    return keys


def test_a_lookup_tells_namespaces_apart(daemon: Daemon) -> None:
    keys = filled(daemon, 0xAA)
    filled(daemon, 0xBB, 2)
    found = daemon.admin("POST", "/lookup", {"keys": [keys[0].hex(), keys[3].hex()]})["pages"]
    assert [(page["namespace"], page["places"]) for page in found] == [
        (A, ["pool", "ram", "disk"]), (B, ["pool", "ram", "disk"]), (A, ["pool", "ram", "disk"])
    ]
    by_prefix = daemon.admin("POST", "/lookup", {"prefix": keys[3].hex()[:10]})
    assert [page["key"] for page in by_prefix["pages"]] == [keys[3].hex()] and by_prefix["complete"]
    assert "does not know tokens" in daemon.admin("POST", "/lookup", {"tokens": {"ids": [1]}}, 409)["detail"]


@pytest.mark.parametrize(
    ("where", "left_a", "left_b"),
    [
        ({"where": "pool", "namespace": "aa"}, ["ram", "disk"], ["pool", "ram", "disk"]),
        ({"where": "store", "store": "disk", "namespace": "aa"}, ["pool", "ram"], ["pool", "ram", "disk"]),
        ({"where": "store", "store": "ram"}, ["pool", "disk"], ["pool", "disk"]),
        ({"where": "all", "namespace": "aa"}, [], ["pool", "ram", "disk"]),
        ({"where": "all"}, [], []),
    ],
)
def test_clearing_removes_only_the_named_pages(
    daemon: Daemon, where: dict[str, str], left_a: list[str], left_b: list[str]
) -> None:
    keys = filled(daemon, 0xAA, 2)
    filled(daemon, 0xBB, 2)
    assert daemon.job("/clear", where)["state"] == "done"
    assert daemon.places(keys, namespace="aa") == [left_a] * 2
    assert daemon.places(keys, namespace="bb") == [left_b] * 2


def test_stores_are_detached_and_attached_while_engines_are_connected(daemon: Daemon) -> None:
    engine, keys = daemon.engine(0xAA), filled(daemon, 0xAA)
    daemon.admin("POST", "/detach", {}, 204)
    wait_for(lambda: not stores_of(daemon, A))
    assert engine.read(keys) == 4  # the pool stays
    daemon.job("/clear", {"where": "pool"})
    assert engine.read(keys) == 0
    filled_later = daemon.engine(0xCC)
    filled_later.store(keys)  # a namespace that is opened now has no store either
    assert daemon.places(keys, namespace="cc") == [["pool"]] * 4
    daemon.admin("POST", "/attach", {"store": "disk"}, 204)
    wait_for(lambda: stores_of(daemon, A) == stores_of(daemon, "cc" * 32) == {"disk"})
    assert engine.read(keys) == 4
    daemon.admin("POST", "/attach", {}, 204)
    wait_for(lambda: stores_of(daemon, A) == {"ram", "disk"})


def test_a_forced_breaker_applies_to_namespaces_that_are_opened_later(daemon: Daemon) -> None:
    filled(daemon, 0xAA)
    daemon.admin("PUT", "/breakers", {"store": "disk", "mode": "off"}, 204)
    keys = keys_of(3, first=50)
    for namespace in (0xAA, 0xDD):
        daemon.engine(namespace).store(keys)
        assert daemon.places(keys, namespace=f"{namespace:02x}") == [["pool", "ram"]] * 3
    status = daemon.admin("GET", "/status")
    assert status["overrides"] == {"disk/read": "off", "disk/write": "off"}
    assert {one["read"]["override"] for one in status["stores"] if one["name"] == "disk"} == {"off"}


def pool_bytes(daemon: Daemon, namespace: str) -> int:
    return next(int(one["pool_bytes"]) for one in daemon.admin("GET", "/status")["namespaces"]
                if one["namespace"] == namespace)


def test_a_quota_limits_the_pool_bytes_of_one_namespace(daemon: Daemon) -> None:
    filled(daemon, 0xAA, 6)
    filled(daemon, 0xBB, 6)
    daemon.admin("PUT", "/quotas", {"namespace": "aa", "quota_bytes": 2 * PAGE_POOL_BYTES}, 204)
    assert pool_bytes(daemon, A) == 2 * PAGE_POOL_BYTES and pool_bytes(daemon, B) == 6 * PAGE_POOL_BYTES
    daemon.engine(0xAA).store(keys_of(6, first=60))
    assert pool_bytes(daemon, A) == 2 * PAGE_POOL_BYTES
    later = "ee" * 32
    daemon.admin("PUT", "/quotas", {"namespace": later, "quota_bytes": PAGE_POOL_BYTES}, 204)
    daemon.engine(0xEE).store(keys_of(3))
    assert pool_bytes(daemon, later) == PAGE_POOL_BYTES
    assert [one["namespace"] for one in daemon.admin("GET", "/quotas")] == [A, later]
    daemon.admin("PUT", "/quotas", {"namespace": "aa", "quota_bytes": None}, 204)
    daemon.engine(0xAA).store(keys_of(6, first=70))
    assert pool_bytes(daemon, A) >= 6 * PAGE_POOL_BYTES
    assert daemon.admin("PUT", "/quotas", {"namespace": "12", "quota_bytes": 1}, 404)["error"] == "unknown_namespace"


def test_pinned_pages_are_not_evicted(daemon: Daemon) -> None:
    keys = filled(daemon, 0xAA, 4)
    pin = {"namespace": "aa", "keys": [key.hex() for key in keys[:2]]}
    first, second = (daemon.admin("POST", "/pins", pin, 201) for _ in range(2))
    assert (first["pages"], first["asked_pages"]) == (2, 2)
    daemon.admin("PUT", "/quotas", {"namespace": "aa", "quota_bytes": PAGE_POOL_BYTES}, 204)
    assert daemon.places(keys) == [["pool", "ram", "disk"]] * 2 + [["ram", "disk"]] * 2
    daemon.admin("DELETE", f"/pins/{first['id']}", code=204)
    daemon.admin("PUT", "/quotas", {"namespace": "aa", "quota_bytes": PAGE_POOL_BYTES}, 204)
    assert "pool" in daemon.places(keys)[1]  # the second pin holds
    daemon.admin("DELETE", f"/pins/{second['id']}", code=204)
    daemon.admin("PUT", "/quotas", {"namespace": "aa", "quota_bytes": PAGE_POOL_BYTES}, 204)
    assert [page for page in daemon.places(keys) if "pool" in page] == [["pool", "ram", "disk"]]


def test_a_pin_expires(daemon: Daemon) -> None:
    keys = filled(daemon, 0xAA, 2)
    daemon.admin("POST", "/pins", {"namespace": "aa", "keys": [keys[0].hex()], "ttl_s": 0.05}, 201)
    wait_for(lambda: daemon.admin("GET", "/pins") == [])
    assert daemon.admin("GET", "/status")["tiers"][0]["pinned_bytes"] == 0
    unknown = daemon.admin("POST", "/pins", {"namespace": "aa", "keys": ["0" * 64]}, 201)
    assert unknown["pages"] == 0 and daemon.admin("GET", "/pins") == []
    assert daemon.admin("POST", "/pins", {"namespace": "12", "keys": [keys[0].hex()]}, 404)["error"]


def test_a_scrub_reads_every_namespace(daemon: Daemon) -> None:
    filled(daemon, 0xAA, 3)
    filled(daemon, 0xBB, 2)
    progress = daemon.job("/scrub", {})["progress"]
    assert (progress["pages"], progress["damaged"], progress["skipped"]) == (5, {}, ["ram"])


# Warm-up

FRAME_BYTES = FrameCodec(bytes(32), PAYLOAD_BYTES).frame_bytes


def store_hits(daemon: Daemon) -> list[tuple[int, int, int]]:
    """Return the counts of each namespace's readers."""
    found = daemon.admin("GET", "/status")["namespaces"]
    return [(one["pool_hits"], one["store_hits"], one["misses"]) for one in found]


def test_a_chain_of_keys_is_read_into_the_pool(daemon: Daemon) -> None:
    keys = filled(daemon, 0xAA)
    daemon.job("/clear", {"where": "pool"})
    before = store_hits(daemon)
    body = {"keys": [key.hex() for key in keys[:3]], "namespace": "aa"}
    dry = daemon.job("/warm", body | {"dry_run": True})["progress"]
    assert daemon.places(keys, namespace="aa") == [["ram", "disk"]] * 4
    job = daemon.job("/warm", body)
    assert (job["kind"], job["state"], job["what"]) == ("warm", "done", "warm-up with 3 pages of namespaces aa...")
    progress = job["progress"]
    assert (progress["pages"], progress["total"], progress["bytes"]) == (3, 3, 3 * FRAME_BYTES) and progress == dry
    assert daemon.places(keys, namespace="aa") == [["pool", "ram", "disk"]] * 3 + [["ram", "disk"]]
    assert store_hits(daemon) == before, "a warm-up is not a reader"
    assert daemon.engine(0xAA).read(keys[:3]) == 3
    pooled, stored, missed = (after - was for was, after in zip(before[0], store_hits(daemon)[0], strict=True))
    assert (pooled, stored, missed) == (3, 0, 0)


def test_the_hottest_chains_of_all_open_namespaces_are_read_into_the_pool(daemon: Daemon) -> None:
    keys = filled(daemon, 0xAA, 12)  # more than one piece
    filled(daemon, 0xBB, 2)
    daemon.job("/clear", {"where": "pool"})
    progress = daemon.job("/warm", {"top_bytes": 1 << 30, "namespace": "bb"})["progress"]
    assert (progress["pages"], progress["skipped"]) == (2, ["ram: cannot be listed"])
    assert daemon.places(keys[:2], namespace="bb") == [["pool", "ram", "disk"]] * 2
    progress = daemon.job("/warm", {"top_bytes": 1 << 30})["progress"]
    assert (progress["store"], progress["pages"], progress["bytes"]) == ("disk", 14, 12 * FRAME_BYTES)
    assert daemon.places(keys, namespace="aa") == [["pool", "ram", "disk"]] * 12


def test_a_warm_up_stays_within_the_quota_and_evicts_nothing(daemon: Daemon) -> None:
    keys = filled(daemon, 0xAA, 4)
    filled(daemon, 0xBB, 4)
    daemon.job("/clear", {"where": "pool", "namespace": "aa"})
    daemon.admin("PUT", "/quotas", {"namespace": "aa", "quota_bytes": 3 * PAGE_POOL_BYTES}, 204)
    later = filled(daemon, 0xAA, 1, first=40)
    dry = daemon.job("/warm", {"top_bytes": 1 << 30, "dry_run": True})["progress"]
    assert (dry["pages"], dry["total"], dry["bytes"]) == (9, 9, 4 * FRAME_BYTES)
    progress = daemon.job("/warm", {"top_bytes": 1 << 30})["progress"]
    assert (progress["pages"], progress["total"], progress["bytes"]) == (7, 9, 2 * FRAME_BYTES)
    assert progress["skipped"] == ["ram: cannot be listed", "memory is full, and a warm-up evicts nothing"]
    assert daemon.places([*later, *keys], namespace="aa") == [["pool", "ram", "disk"]] * 3 + [["ram", "disk"]] * 2
    assert daemon.places(keys, namespace="bb") == [["pool", "ram", "disk"]] * 4
    assert pool_bytes(daemon, A) == 3 * PAGE_POOL_BYTES


def test_ctl_warms_the_pool_of_a_daemon(daemon: Daemon) -> None:
    keys = filled(daemon, 0xAA)
    daemon.job("/clear", {"where": "pool"})
    ctl = Ctl(("-c", str(daemon.config_file)))
    lines = ctl("warm", "--top", "1GiB", "--rate", "100MiB").out.splitlines()
    assert lines[0].startswith("warm-up with the hottest 1.0 GiB: done after")
    assert lines[1:] == ["  in memory 4 of 4 pages", "  read      80.0 KiB", "  skipped   ram: cannot be listed"]
    assert daemon.places(keys, namespace="aa") == [["pool", "ram", "disk"]] * 4
    assert "in memory 1 of 1 page" in ctl.quick("warm", keys[0].hex(), "--namespace", "aa").out
    assert "in memory 0 of 1 page" in ctl.quick("warm", "0" * 64, "--namespace", "aa", code=1).out


def test_a_daemon_refuses_tokens_and_needs_an_engine_before_a_warm_up(tmp_path: Path) -> None:
    with Daemon(tmp_path / "daemon") as daemon:
        answer = daemon.admin("POST", "/warm", {"prompts": [{"ids": [1, 2]}]}, 409)
        assert answer["error"] == "unsupported" and "does not know how engines hash tokens" in answer["detail"]
        answer = daemon.admin("POST", "/warm", {"top_bytes": 1 << 20}, 404)
        assert "start an engine first" in answer["detail"]
        daemon.engine(0xAA).store(keys_of(1))
        answer = daemon.admin("POST", "/warm", {"top_bytes": 1, "namespace": "12"}, 404)
        assert "list the namespaces" in answer["detail"]


def test_a_daemon_without_a_pool_cannot_be_warmed(tmp_path: Path) -> None:
    with Daemon(tmp_path / "daemon", pool="0B") as daemon:
        assert "set daemon.pool" in daemon.admin("POST", "/warm", {"top_bytes": 1 << 20}, 409)["detail"]


def test_ctl_finds_the_daemon_by_its_configuration(daemon: Daemon) -> None:
    filled(daemon, 0xAA, 2)
    ctl = Ctl(("-c", str(daemon.config_file)))
    out = ctl("status", columns=60).out
    assert "daemon 0.1.0, ready" in out and "model-aa" in out and "no clients" in out
    assert max(map(len, out.splitlines())) <= 60
    assert "2.0 MiB" in ctl.quick("quota", "aa", "2MiB").out
    assert ctl.quick("quota", "aa", "none").out == "no quotas\n"
    keys = [key.hex() for key in keys_of(2)]
    pin = ctl.quick("--json", "pin", "--namespace", "aa", *keys).json
    assert pin["pages"] == 2 and pin["id"] in ctl.quick("pin").out
    assert "begins with these digits" in ctl.quick("quota", "12", "1MiB", code=2).err


# Access rights


def over_tcp(daemon: Daemon, method: str, target: str, token: str | None) -> int:
    """Make one request over TCP. Return its status."""
    with contextlib.closing(daemon.tcp()) as client:
        return client.call(method, target, None, token)[0]


@pytest.fixture
def with_tokens(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    files = {"token_file": daemon.secret("data", DATA_TOKEN), "admin_token_file": daemon.secret("admin", ADMIN_TOKEN)}
    with Daemon(tmp_path, **files) as running:
        yield running


def test_over_tcp_only_the_admin_token_gives_access_to_the_admin_surface(with_tokens: Daemon) -> None:
    daemon = with_tokens
    for token, code in ((None, 403), (DATA_TOKEN, 403), ("wrong", 403), (ADMIN_TOKEN, 200)):
        assert over_tcp(daemon, "GET", "/v1/admin/status", token) == code
        assert over_tcp(daemon, "GET", "/v1/explain", token) == code
    assert over_tcp(daemon, "POST", "/v1/hints", DATA_TOKEN) == 403
    assert over_tcp(daemon, "POST", "/v1/hints", ADMIN_TOKEN) == 422, "it has no body"
    assert over_tcp(daemon, "POST", "/v1/admin/detach", DATA_TOKEN) == 403
    # The admin token gives no access to pages.
    usage = f"/v1/namespaces/{A}/usage"
    assert over_tcp(daemon, "GET", usage, ADMIN_TOKEN) in (401, 403)
    assert over_tcp(daemon, "GET", usage, DATA_TOKEN) == 404
    token_file = daemon.folder / "admin"
    url = ("--url", f"http://{LOOPBACK}:{daemon.port}")
    ctl = Ctl((*url, "--token-file", str(token_file)))
    assert ctl.quick("--json", "status").json["kind"] == "daemon"
    assert ctl.quick("--json", "explain").json["unit"] == "pages"
    assert "needs the admin token" in Ctl(url).quick("status", code=2).err


def test_with_an_admin_token_the_socket_needs_it_too_and_actions_are_logged(with_tokens: Daemon) -> None:
    daemon = with_tokens
    daemon.admin("POST", "/detach", {}, 403)
    daemon.admin("POST", "/detach", {}, 403, token=DATA_TOKEN)
    assert daemon.admin("GET", "/status", token=ADMIN_TOKEN)["attached"]
    daemon.admin("POST", "/detach", {}, 204, token=ADMIN_TOKEN)
    assert Ctl(("-c", str(daemon.config_file))).quick("stores").out == "no stores are open\n"
    log = daemon.log
    assert "admin: token: detach the storage: ok" in log
    assert f"admin: uid {os.geteuid()}: POST '/v1/admin/detach': refused (forbidden)" in log
    assert ADMIN_TOKEN not in log and DATA_TOKEN not in log

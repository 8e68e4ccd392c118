"""The daemon as a process: the lock of its socket, restarts, draining, reloads, and messages to systemd."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.config import HiCacheConfig
from hicache.daemon import server as server_module
from hicache.daemon.node import Node
from hicache.daemon.reload import changed_entries
from hicache.daemon.server import Server
from hicache.daemon.statistics import NodeState
from hicache_lab.faults import spoiled
from tests.daemon.daemons import NAMESPACE, TOKEN, Daemon, EngineMemory, keys_of, secret, write
from tests.waiting import wait_for

SLOW = spoiled({"type": "memory"}, latency="700ms")
HANGING = spoiled({"type": "memory"}, latency="1h")


def _file_store(scratch: Path) -> dict[str, Any]:
    return {"type": "file", "options": {"path": str(scratch / "store"), "free_space_floor": "0B"}}


def test_engines_reconnect_to_a_daemon_that_was_killed_and_restarted(
    start: Callable[..., Daemon], scratch: Path, memory: EngineMemory
) -> None:
    daemon = start(storage=_file_store(scratch))
    keys = keys_of(4)
    with contextlib.closing(daemon.client()) as client:
        first = client.open()[1]["instance"]
        memory.attach(client)
        assert write(client, keys)[1]["outcomes"] == ["stored"] * 4
    daemon.kill()
    assert daemon.socket.exists()  # the killed process did not remove it
    daemon.start()
    with contextlib.closing(daemon.client()) as client:
        fields: dict[str, Any] = {"keys": keys, "memory": memory.name, "frames": [0, 1, 2, 3]}
        assert client.verb("get", **fields)[0] == 404
        assert client.open()[1]["instance"] != first
        assert client.verb("get", **fields)[0] == 404
        memory.attach(client)
        assert client.verb("get", **fields)[1]["outcomes"] == ["hit"] * 4


def _ask_in_background(daemon: Daemon, answers: list[Any]) -> threading.Thread:
    def ask() -> None:
        with contextlib.closing(daemon.client()) as client:
            try:
                answers.append(client.verb("exists", keys=keys_of(1)))
            except (OSError, EOFError) as error:
                answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: daemon.status()["in_flight_requests"] == 2)
    return thread


def test_sigterm_lets_requests_end_and_the_exit_code_is_0(start: Callable[..., Daemon]) -> None:
    daemon = start(storage=SLOW)
    daemon.ask("PUT", f"/v1/namespaces/{NAMESPACE}", {"payload_bytes": 12000})
    with contextlib.closing(daemon.client()) as idle:
        idle.call("GET", "/livez")
        answers: list[Any] = []
        thread = _ask_in_background(daemon, answers)
        assert daemon.stop() == 0
        thread.join()
        assert answers == [(200, {"pages": 0, "errors": []})]
        assert idle.sock.recv(1) == b""  # an idle connection is closed at once
    assert not daemon.socket.exists()
    assert "draining" in daemon.log


def test_a_hanging_store_does_not_keep_the_daemon_from_stopping(start: Callable[..., Daemon]) -> None:
    daemon = start({"drain_timeout": "200ms"}, storage=HANGING)
    daemon.ask("PUT", f"/v1/namespaces/{NAMESPACE}", {"payload_bytes": 12000})
    answers: list[Any] = []
    thread = _ask_in_background(daemon, answers)
    assert daemon.stop() == 0
    thread.join()
    assert isinstance(answers[0], OSError)
    assert "1 requests did not end in time" in daemon.log


def test_a_reload_changes_tokens_limits_and_overrides_and_logs_the_other_entries(
    start: Callable[..., Daemon], scratch: Path
) -> None:
    token = Path(secret(scratch, "token", TOKEN))
    daemon = start({"token_file": str(token), "pool": 0})
    target, body = f"/v1/namespaces/{NAMESPACE}", {"payload_bytes": 12000, "label": "tests", "weights_epoch": 3}
    with contextlib.closing(daemon.tcp()) as client, contextlib.closing(daemon.client()) as local:
        assert client.call("PUT", target, body, TOKEN)[0] == 200
        assert write(local, keys_of(1))[1]["outcomes"] == ["stored"]
        token.write_text("another-token")
        daemon.configure(
            {"token_file": str(token), "pool": "8MiB", "namespaces_max": 1},
            storage={"type": "memory", "guard": {"read": "off"}},
        )
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: "restart it to change: daemon.pool" in daemon.log)
        assert "changed: daemon.namespaces_max, storage.guard.read" in daemon.log
        assert client.call("PUT", target, body, TOKEN)[0] == 401
        assert client.call("PUT", target, body, "another-token")[0] == 200
        answer = local.verb("exists", keys=keys_of(1))[1]
        assert answer["pages"] == 0 and answer["errors"]
        daemon.configure({"token_file": str(token), "pool": 0})
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: local.verb("exists", keys=keys_of(1))[1]["pages"] == 1)
        daemon.configure({"token_file": str(token), "pool": 0, "namespaces_max": 1})
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: daemon.log.count("changed: daemon.namespaces_max") == 3)
        assert local.open("cd" * 32)[0] == 200
        assert [one["namespace"] for one in daemon.status()["namespaces"]] == ["cd" * 32]
    assert "another-token" not in daemon.log


def test_an_invalid_configuration_is_not_loaded_and_changes_nothing(start: Callable[..., Daemon]) -> None:
    daemon = start()
    daemon.config_file.write_text("daemon: {socket: 5\n")
    daemon.signal(signal.SIGHUP)
    wait_for(lambda: "reload refused, nothing was changed" in daemon.log)
    daemon.configure({"token_env": "NOT_SET"})
    daemon.signal(signal.SIGHUP)
    wait_for(lambda: "NOT_SET is not set" in daemon.log)
    daemon.configure(storage={"type": "tape"})
    daemon.signal(signal.SIGHUP)
    wait_for(lambda: daemon.log.count("reload refused") == 3)
    assert "tape" in daemon.log
    assert daemon.is_ready()


def test_a_changed_store_needs_a_restart_and_a_changed_override_does_not() -> None:
    def config(path: str, read: str, **daemon: Any) -> HiCacheConfig:
        return HiCacheConfig(
            storage={"type": "file", "options": {"path": path}, "guard": {"read": read}}, daemon=daemon
        )

    now, later = changed_entries(config("/a", "auto"), config("/b", "off", drain_timeout="1s", threads=3))
    assert now == ["daemon.drain_timeout", "storage.guard.read"]
    assert later == ["daemon.threads", "storage.options.path"]
    assert changed_entries(config("/a", "auto"), config("/a", "auto")) == ([], [])
    assert changed_entries(config("/a", "auto"), HiCacheConfig(storage={"type": "memory"})) == ([], ["storage"])


def test_systemd_is_notified_of_each_state(scratch: Path) -> None:
    daemon = Daemon(scratch)
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(str(scratch / "notify"))
        manager.settimeout(30)
        daemon.environ = {"NOTIFY_SOCKET": str(scratch / "notify"), "WATCHDOG_USEC": "100000"}
        try:
            daemon.start()
            assert manager.recv(1000) == b"READY=1"
            assert manager.recv(1000) == b"WATCHDOG=1"
            daemon.signal(signal.SIGHUP)
            told = b""
            while not told.startswith(b"RELOADING=1\nMONOTONIC_USEC="):
                told = manager.recv(1000)
            while told != b"READY=1":
                told = manager.recv(1000)
            daemon.signal(signal.SIGTERM)
            while told != b"STOPPING=1":
                told = manager.recv(1000)
            assert daemon.wait() == 0
        finally:
            daemon.kill()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"storage": {"type": "nothing"}}, "backend 'nothing' is not known"),
        ({"storage": None, "daemon": {"pool": 0}}, "needs storage or a pool"),
        ({"daemon": {"tls": {"certificate": "/none", "key": "/none"}}}, "daemon.tls.certificate '/none'"),
        ({"integrity": {"mac_key_env": "NOT_SET"}}, "NOT_SET: is not set"),
    ],
)
def test_an_unusable_configuration_ends_the_daemon_before_it_listens(
    scratch: Path, sections: dict[str, Any], message: str
) -> None:
    daemon = Daemon(scratch, **sections)
    daemon.launch()
    assert daemon.wait() == 2
    assert message in daemon.log and "Traceback" not in daemon.log
    assert not daemon.socket.exists()


def test_freeing_large_memory_blocks_neither_the_watchdog_nor_the_shutdown(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freeing the memory of a large engine takes the system minutes, and systemd kills a daemon without watchdog
    messages."""
    ends, in_time = threading.Event(), list[bool]()
    config = HiCacheConfig.model_validate({"daemon": {"pool": "1MiB", "staging": "1MiB"}})
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(str(scratch / "notify"))
        manager.settimeout(30)
        environ = {"NOTIFY_SOCKET": str(scratch / "notify"), "WATCHDOG_USEC": "20000"}
        node = Node(config, environ)

        def tend() -> list[str]:
            in_time.append(ends.wait(30))
            return []

        monkeypatch.setattr(node.memories, "tend", tend)
        server = Server(node, lambda: config, environ)

        async def serve() -> None:
            running = asyncio.create_task(server._until_stopped())
            for _ in range(3):
                assert await asyncio.to_thread(manager.recv, 1000) == b"WATCHDOG=1"
            server._stopping.set()
            await running
            ends.set()

        asyncio.run(serve())
    assert in_time == [True]


def test_a_failing_daemon_holds_its_lock_until_its_requests_have_ended(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines consider a daemon without its lock dead, and use their frames again."""
    config = HiCacheConfig.model_validate(
        {"daemon": {"pool": "1MiB", "staging": "1MiB", "socket": str(scratch / "run" / "daemon.sock")}}
    )
    node = Node(config, {})
    server = Server(node, lambda: config, {})
    states: list[tuple[NodeState, bool]] = []

    async def drain(saving: asyncio.Task[None]) -> None:
        states.append((node.state, (scratch / "run" / "daemon.sock").exists()))
        await saving

    def fail() -> list[str]:
        raise OSError("no such file")

    monkeypatch.setattr(server, "_drain", drain)
    monkeypatch.setattr(node.memories, "tend", fail)
    monkeypatch.setattr(server_module, "_raise_descriptor_limit", lambda: None)  # keep the limit of this process
    with pytest.raises(OSError, match="no such file"):
        asyncio.run(server.run())
    assert states == [(NodeState.DRAINING, True)]
    node.close(time.monotonic())

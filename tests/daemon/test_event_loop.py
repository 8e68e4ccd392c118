"""Nothing on the daemon's event loop touches a disk: while it starts, serves every route, reloads and ends."""

from __future__ import annotations

import contextlib
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import make_certificates
from tests.daemon.daemons import (
    FRAME_BYTES,
    NAMESPACE,
    PAYLOAD_BYTES,
    ROOT,
    TOKEN,
    Client,
    Daemon,
    EngineMemory,
    keys_of,
    read,
    write,
)
from tests.daemon.watched import MARK
from tests.mounted import MountedSecret
from tests.waiting import WAIT_S, wait_for, wait_until_made

NEW_TOKEN = "another-token-of-the-engines"
KEYS = [key.hex() for key in keys_of(2)]


class WatchedDaemon(Daemon):
    module = "tests.daemon.watched"

    def accesses(self) -> list[str]:
        """Return the accesses to files on the event loop so far."""
        return [line for line in self.log.splitlines() if line.startswith(MARK)]


def _bodies(memory: EngineMemory) -> dict[tuple[str, str], Any]:
    """Return the bodies of the calls that need one, by method and end of the path."""
    device, inode = memory.shared.identity
    batch = {"keys": KEYS, "timeout_s": WAIT_S}
    frames = {"memory": memory.name, "frames": [0, 1]}
    return {
        ("PUT", "{namespace}"): {"payload_bytes": PAYLOAD_BYTES, "weights_epoch": 3, "label": "tests"},
        ("PUT", "{name}"): {"frame_bytes": FRAME_BYTES, "pages": memory.pages, "device": device, "inode": inode},
        **{("POST", verb): batch for verb in ("exists", "has", "touch", "read", "delete")},
        **{("POST", verb): batch | frames for verb in ("get", "set")},
        ("POST", "{namespace}/clear"): {"timeout_s": WAIT_S},
        ("POST", "lookup"): {"keys": KEYS}, ("POST", "explain"): {"keys": KEYS},
        ("POST", "scrub"): {}, ("POST", "admin/clear"): {"where": "all"}, ("POST", "warm"): {"keys": KEYS},
        ("POST", "pins"): {"namespace": NAMESPACE, "keys": KEYS, "ttl_s": 10},
        ("POST", "hints"): {"actions": [
            {"action_id": kind, "action_type": kind, "payload": {"page_keys": KEYS}}
            for kind in ("kv.pin", "kv.prefetch", "kv.release")
        ]},
        ("POST", "attach"): {}, ("POST", "detach"): {},
        ("PUT", "breakers"): {"mode": "auto"}, ("PUT", "quotas"): {"namespace": NAMESPACE, "quota_bytes": 1 << 20},
        ("PUT", "log_level"): {"level": "info"},
    }


def _call_every_route(client: Client, memory: EngineMemory) -> None:
    """Make each call of the OpenAPI document, removals last. Only those that cannot succeed alone may be refused."""
    bodies = _bodies(memory)
    paths = client.call("GET", "/openapi.json")[1]["paths"]
    calls = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    calls.sort(key=lambda call: (call[0] == "DELETE", "detach" in call[1], call[0] != "PUT", "set" not in call[1]))
    filled = {"{namespace}": NAMESPACE, "{name}": memory.name, "{job}": "none", "{pin_id}": "none"}
    refused = []
    for method, path in calls:
        target = path
        for name, value in filled.items():
            target = target.replace(name, value)
        if path.endswith("/write"):
            status = write(client, keys_of(2))[0]
        else:
            body = next((body for (verb, end), body in bodies.items() if verb == method and path.endswith(end)), None)
            target += "?engine=" if method == "DELETE" and path.endswith("{namespace}") else ""
            status = client.call(method, target, body)[0]
        if status >= 300:
            refused.append((method, path, status))
    assert len(calls) > 35
    # A daemon does not know prompts.
    assert {path.rpartition("/")[2] for method, path, _ in refused if (method, path) != ("POST", "/v1/explain")} <= {
        "{job}", "{pin_id}"
    }, refused


def test_nothing_on_the_event_loop_touches_a_disk(
    scratch: Path, memory: EngineMemory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Over a file store, with a token and certificates that are replaced, from the start to the end."""
    made, other = (make_certificates(tmp_path_factory.mktemp(name)) for name in ("made", "other"))
    served = MountedSecret(scratch / "served", _secrets(made, TOKEN))
    daemon = WatchedDaemon(
        scratch,
        {"token_file": str(served["token"]), "tls": {"certificate": str(served["cert"]), "key": str(served["key"])}},
        storage={"type": "file", "options": {"path": str(scratch / "store"), "free_space_floor": "0B"}},
    )
    with daemon:
        with contextlib.closing(daemon.client()) as client:
            for name in ("", "page.css", "page.js"):
                assert client.call("GET", f"/{name}")[0] == 200
            _call_every_route(client, memory)
            assert client.open()[0] == 200
        with contextlib.closing(daemon.tcp(ssl.create_default_context(cafile=made.ca_file))) as remote:
            assert write(remote, keys_of(2), TOKEN)[0] == read(remote, keys_of(2), TOKEN)[0] == 200
            assert read(remote, keys_of(2), "wrong")[0] == 401
        served.replace(_secrets(other, NEW_TOKEN))
        wait_for(lambda: daemon.log.count("read again, because a file has changed") == 2)

        def read_status() -> int:
            with contextlib.closing(daemon.tcp(ssl.create_default_context(cafile=other.ca_file))) as remote:
                return int(read(remote, keys_of(2), NEW_TOKEN)[0])

        # The line is written a moment before the listener has the new certificate.
        assert wait_until_made(read_status, ssl.SSLCertVerificationError) == 200
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: "reloaded; changed: no entry" in daemon.log)
        assert daemon.stop() == 0
    assert (daemon.socket.parent / "history.json").exists()  # so it was saved
    assert daemon.accesses() == []


def _secrets(made: Any, token: str) -> dict[str, str | bytes]:
    return {"token": token, "cert": made.cert_file.read_bytes(), "key": made.key_file.read_bytes()}


def test_the_watch_reports_what_it_should() -> None:
    """The control of the test above: opening, asking for the state of a file, importing, and OpenSSL's own reading."""
    program = """if True:
        import asyncio, concurrent.futures.thread, contextlib, os, ssl
        from tests.daemon.watched import watch
        calls = [
            lambda: open(os.devnull).close(), lambda: os.stat(os.devnull), lambda: os.listdir("/"),
            lambda: __import__("no_such_module"),
            lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(os.devnull),
        ]

        async def main():
            await asyncio.to_thread(open, os.devnull)
            for call in calls:
                os.write(2, b"call\\n")
                with contextlib.suppress(ImportError, OSError):
                    call()

        watch()
        open(os.devnull).close()  # not on a loop
        asyncio.run(main())
    """
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                         timeout=WAIT_S, check=True)
    before, *reports = ran.stderr.split("call\n")
    assert before == ""
    assert all(report.startswith(MARK) for report in reports) and len(reports) == 5, reports

"""NVIDIA Dynamo's KV indexer in its own process, and the steps that tests run with it (see process.py).

The indexer listens on all addresses, so it runs in a network namespace of its own, where only this process reaches it.
It subscribes to sockets in the file system, which all namespaces share. `options` are `block_size`, and `endpoint` and
`replay_endpoint` of a publisher.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

from .process import EngineProcess, serve

_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_PORT = 8090
_URL = f"http://127.0.0.1:{_PORT}"
_MODEL = "default"
_CALL_S = 10.0


class DynamoIndex(EngineProcess):
    """An indexer that follows one publisher."""

    def __init__(
        self, endpoint: str, *, block_size: int, replay_endpoint: str | None = None, folder: Path
    ) -> None:
        options = {"endpoint": endpoint, "block_size": block_size, "replay_endpoint": replay_endpoint}
        super().__init__("tests.engines.dynamo_index", options, folder=folder)

    def scores(self, tokens: list[int]) -> tuple[int, int, int]:
        """Return how many leading tokens of a prompt the engine has on its device; there or on the host; and there, on
        the host or on storage."""
        found = self.call("query", tokens=tokens)["instances"].get("1", {})
        return found.get("gpu", 0), found.get("cpu", 0), found.get("disk", 0)


def enter_network_namespace() -> None:
    """Move this process into a network namespace with nothing but a loopback device. Raises OSError, with the reason,
    where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    # An unprivileged user may do it in a user namespace, if the kernel allows those.
    if libc.unshare(_CLONE_NEWNET) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"cannot make a network namespace ({errno.errorcode.get(number)}), and the indexer listens on all "
            "addresses; run the tests as root, or allow user and network namespaces (sysctl -a | grep namespaces)",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    enter_network_namespace()
    program = "import sys; from dynamo.llm import run_kv_indexer; run_kv_indexer(sys.argv[1:])"
    indexer = subprocess.Popen(
        [sys.executable, "-c", program, "--port", str(_PORT), "--threads", "1"], env=os.environ | {"NO_COLOR": "1"}
    )

    def ask(path: str, **body: object) -> Any:
        """Return the decoded answer to a POST, or to a GET without a body."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(_URL + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_CALL_S) as answer:
            return json.loads(answer.read() or b"null")

    def answers() -> bool:
        if indexer.poll() is not None:
            raise RuntimeError("the indexer has ended")
        try:
            ask("/workers")
        except OSError:
            return False
        return True

    def is_listening() -> bool:
        return all(each["status"] == "active" for worker in ask("/workers") for each in worker["listeners"].values())

    wait_for(answers)
    ask("/register", instance_id=1, model_name=_MODEL, **options)
    wait_for(is_listening)

    def query(tokens: list[int]) -> object:
        return ask("/query", token_ids=tokens, model_name=_MODEL)

    return {"query": query}


if __name__ == "__main__":
    serve(start)

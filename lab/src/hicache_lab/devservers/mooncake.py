"""Mooncake Store: its master, and the client daemon that provides memory independently of engines."""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from collections.abc import Mapping
from typing import Any, ClassVar

from hicache.backends.mooncake.client import MOONCAKE_LIBRARIES
from hicache.errors import BackendUnavailable
from hicache.units import MIB

from .base import Command, DevServer, ServerGroup, Storage
from .libraries import only_unpacked, unpacked_libraries
from .packages import package_file
from .ports import LOOPBACK

_PROBE_TIMEOUT_S = 0.5


def _listens(port: int) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=_PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False


def library_path(libraries: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which a program finds `libraries`; empty if the system has them.

    Raises ConfigError that names the Debian packages of missing libraries.
    """
    if not only_unpacked(libraries):
        return {}
    folder, before = str(unpacked_libraries()), os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{folder}:{before}" if before else folder}


class MooncakeMaster(DevServer):
    """The master: knows which client has which page, and stores none itself. A restart forgets everything.

    `lease_ms` is how long a page is protected after each lookup. None is Mooncake's default of 10 s, which is too long
    for tests that fill the store. `flags` are added to the command line.
    """

    name: ClassVar[str] = "mooncake master"
    port_names: ClassVar[tuple[str, ...]] = ("port", "metrics")
    grace_s: ClassVar[float] = 0.0  # it has no data on disk, and an orderly end takes almost a second

    def __init__(self, *, lease_ms: int | None = None, flags: tuple[str, ...] = (), port: int | None = None) -> None:
        super().__init__(port=port)
        self._lease_ms = lease_ms
        self._flags = flags

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def metrics_address(self) -> str:
        """The address of its HTTP server, which has metrics and a list of pages."""
        return f"{LOOPBACK}:{self.ports['metrics']}"

    def command(self) -> Command:
        lease = [] if self._lease_ms is None else [f"--default_kv_lease_ttl={self._lease_ms}"]
        arguments = [
            str(package_file("mooncake", "mooncake_master", extra="mooncake-cpu")),
            f"--rpc_address={LOOPBACK}", f"--rpc_port={self.port}",
            f"--metrics_host={LOOPBACK}", f"--metrics_port={self.ports['metrics']}",
            "--logtostderr=true", *lease, *self._flags,
        ]
        return arguments, library_path(MOONCAKE_LIBRARIES)

    def serves(self) -> bool:
        """True if its HTTP server, which starts last, answers and clients can connect."""
        try:
            self.segment_bytes()
        except BackendUnavailable:
            return False
        return _listens(self.port)

    def segment_bytes(self) -> int:
        """Return the memory that its clients provide. Raises BackendUnavailable if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=_PROBE_TIMEOUT_S) as answer:
                figures = answer.read().decode()
        except OSError as error:
            raise BackendUnavailable(f"{self.name}: does not answer: {error}") from error
        found = re.search(r"^master_total_capacity_bytes (\S+)$", figures, flags=re.MULTILINE)
        return int(float(found[1])) if found is not None else 0

    def storage(self, **extra: Any) -> Storage:
        return "mooncake", {"master": self.address, "admin": self.metrics_address, **extra}

    def environ(self) -> dict[str, str]:
        return {}


class MooncakeClientDaemon(DevServer):
    """A client of `master` in its own process, with `segment_bytes` of memory for pages.

    Its pages outlive the engines. It chooses some ports itself and opens them on all interfaces, so use it only where
    the network is trusted.
    """

    name: ClassVar[str] = "mooncake client daemon"

    def __init__(self, master: MooncakeMaster, *, segment_bytes: int = 512 * MIB, port: int | None = None) -> None:
        super().__init__(port=port)
        self._master = master
        self._segment_bytes = segment_bytes

    @property
    def address(self) -> str:
        """The address for engines."""
        return f"{LOOPBACK}:{self.port}"

    def command(self) -> Command:
        arguments = [
            str(package_file("mooncake", "mooncake_client", extra="mooncake-cpu")),
            f"--host={LOOPBACK}", f"--port={self.port}", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp",
            f"--master_server_address={self._master.address}", f"--global_segment_size={self._segment_bytes}",
            "--logtostderr=true",
        ]
        return arguments, {"MC_STORE_CLIENT_SETUP_RETRIES": "1", **library_path(MOONCAKE_LIBRARIES)}

    def serves(self) -> bool:
        """True if it listens and its memory is registered at the master."""
        try:
            return _listens(self.port) and self._master.segment_bytes() > 0
        except BackendUnavailable:
            return False

    def storage(self, **extra: Any) -> Storage:
        kind, options = self._master.storage()
        return kind, {**options, "daemon": self.address, **extra}

    def environ(self) -> dict[str, str]:
        return {}


class MooncakeStore(ServerGroup):
    """A master with one client daemon, for engines that share pages on one machine and may restart.

    `port` is the master's.
    """

    def __init__(self, *, port: int | None = None) -> None:
        self.master = MooncakeMaster(port=port)
        self.daemon = MooncakeClientDaemon(self.master)
        self.servers = self.master, self.daemon

    def unite(self) -> None:
        pass  # the daemon serves once its memory is registered at the master

    def storage(self, **extra: Any) -> Storage:
        return self.daemon.storage(**extra)

    def environ(self) -> dict[str, str]:
        return self.daemon.environ()

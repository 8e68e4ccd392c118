"""Notifies systemd of the daemon's state (sd_notify(3)): a datagram to the socket `NOTIFY_SOCKET`."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping


class ServiceManager:
    """Does nothing without a service manager. Does not block."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # an abstract socket
            self._address = "\0" + self._address[1:]
        is_watched = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_us = environ.get("WATCHDOG_USEC", "") if is_watched else ""
        # Half of the watchdog's timeout.
        self.watchdog_s = int(watchdog_us) / 2e6 if watchdog_us.isdecimal() and int(watchdog_us) else None

    def ready(self) -> None:
        """Report that the daemon serves."""
        self._send("READY=1")

    def reloading(self) -> None:
        """Report a reload of the configuration; `ready` follows."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Report that the daemon drains."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Report that the event loop runs."""
        self._send("WATCHDOG=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        # An error means that the service manager is being restarted; its successor keeps its records.
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as out:
            out.sendto(state.encode(), self._address)

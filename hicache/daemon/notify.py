"""What systemd is told of the daemon's state (sd_notify(3)): a datagram to the socket that `NOTIFY_SOCKET` names."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping


class ServiceManager:
    """Sends nothing where no service manager asks for it. Does not block."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # an abstract socket
            self._address = "\0" + self._address[1:]
        is_watched = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_us = environ.get("WATCHDOG_USEC", "") if is_watched else ""
        # Half of the time after which the service manager takes the daemon for hung.
        self.watchdog_s = int(watchdog_us) / 2e6 if watchdog_us.isdecimal() and int(watchdog_us) else None

    def ready(self) -> None:
        """The daemon serves."""
        self._send("READY=1")

    def reloading(self) -> None:
        """It reads its configuration again; `ready` follows."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """It drains."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Its event loop runs."""
        self._send("WATCHDOG=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        # A service manager that is being restarted: its next one asks systemd's own records.
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as out:
            out.sendto(state.encode(), self._address)

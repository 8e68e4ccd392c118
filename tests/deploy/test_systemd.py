"""deploy/systemd: systemd accepts and confines each unit, and the daemon follows the protocol of the unit."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.served import CONFIG, Place, served
from tests.waiting import wait_for

UNITS = ("hicache.service", "user/hicache.service")
ANALYZE = shutil.which("systemd-analyze")
# In tenths, as systemd-analyze expects. It rates an exposure up to 5.0 as medium and up to 2.0 as ok.
EXPOSURE_MAX = "20"

needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze, of Debian's package systemd")


def entry(unit: str, name: str) -> str:
    """Return the only value of an entry."""
    (value,) = re.findall(rf"^{name}=(.*)$", unit, flags=re.MULTILINE)
    return str(value)


def analyze(command: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze."""
    assert ANALYZE is not None
    environ = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_COLORS": "0"}
    return subprocess.run([ANALYZE, *command], env=environ, capture_output=True, text=True, timeout=60, check=False)


def installed(repository: Path, tmp_path: Path, name: str) -> Path:
    """Copy a unit, with the path of the installed program. Return the path of the copy."""
    unit = (repository / "deploy/systemd" / name).read_text(encoding="utf-8")
    hicache = Path(sys.executable).with_name("hicache")
    path = tmp_path / "hicache.service"
    path.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={hicache}", unit, flags=re.MULTILINE), encoding="utf-8")
    return path


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(repository: Path, tmp_path: Path, name: str) -> None:
    """The control: systemd reports an unknown entry."""
    path = installed(repository, tmp_path, name)
    command = ["--user" if name.startswith("user/") else "--system", "verify", str(path)]
    result = analyze(command, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    path.write_text(path.read_text(encoding="utf-8").replace("WatchdogSec=", "WatchdogSeconds="), encoding="utf-8")
    assert "WatchdogSeconds" in analyze(command, tmp_path).stderr


@needs_systemd
def test_the_unit_confines_the_daemon(repository: Path, tmp_path: Path) -> None:
    """The control: without its confinement the unit is over the limit."""
    path = installed(repository, tmp_path, "hicache.service")
    command = ["security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", str(path)]
    result = analyze(command, tmp_path)
    assert result.returncode == 0, result.stdout
    text = re.sub(r"^(Protect|Restrict|SystemCall|Capability).*\n", "", path.read_text(), flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")
    assert analyze(command, tmp_path).returncode != 0


@pytest.mark.parametrize("name", UNITS)
def test_the_unit_makes_the_directory_of_the_socket(repository: Path, name: str) -> None:
    unit = (repository / "deploy/systemd" / name).read_text(encoding="utf-8")
    assert (entry(unit, "RuntimeDirectory"), entry(unit, "RuntimeDirectoryMode")) == ("hicache", "0700")
    if name == "hicache.service":
        assert entry(unit, "Environment") == "XDG_RUNTIME_DIR=/run"
    assert "\nRemoveIPC=" not in unit, "the entry would remove the memory of engines when the daemon stops"


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Yield a socket that receives notifications in place of systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(path))
        notify.settimeout(30)
        yield notify


@pytest.mark.servers
@pytest.mark.parametrize("name", UNITS)
def test_the_daemon_follows_the_notify_protocol_of_the_unit(repository: Path, tmp_path: Path, name: str) -> None:
    """The test checks Type=notify, WatchdogSec= and ExecReload=, and receives the notifications in place of systemd."""
    unit = (repository / "deploy/systemd" / name).read_text(encoding="utf-8")
    assert entry(unit, "Type") == "notify" and entry(unit, "ExecReload") == "/bin/kill -HUP $MAINPID"
    assert int(entry(unit, "WatchdogSec")) > 0
    place = Place.make(tmp_path)
    (tmp_path / "etc/daemon.yaml").write_text(
        f"daemon: {{socket: {place.socket}, pool: 16MiB}}\n"
        f"storage: {{type: file, options: {{path: {tmp_path}/lib/pages, free_space_floor: 0B}}}}\n"
    )
    arguments = entry(unit, "ExecStart").split()[1:-1]
    with listening(tmp_path / "notify") as notify:
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        received: set[str] = set()

        def receive() -> None:
            received.update(notify.recv(4096).decode().splitlines())

        with served(place, [*arguments, CONFIG], environ) as process:
            wait_for(lambda: {"READY=1", "WATCHDOG=1"} <= received, receive)
            received.clear()
            process.send_signal(signal.SIGHUP)
            wait_for(lambda: {"RELOADING=1", "READY=1"} <= received or "WATCHDOG=1" in received, receive)
        wait_for(lambda: "STOPPING=1" in received, receive)

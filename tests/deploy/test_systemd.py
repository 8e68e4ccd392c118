"""deploy/systemd: systemd accepts and confines each unit, and the daemon follows the protocol of the unit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    return subprocess.run([ANALYZE, *command], env=environ, capture_output=True, text=True, timeout=300, check=False)


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


@pytest.mark.parametrize("name", UNITS)
def test_the_unit_expects_the_notifications_and_the_signal_of_the_daemon(repository: Path, name: str) -> None:
    """tests/daemon/test_process.py receives them in place of systemd; test_contained.py runs ExecStart."""
    unit = (repository / "deploy/systemd" / name).read_text(encoding="utf-8")
    assert entry(unit, "Type") == "notify" and entry(unit, "ExecReload") == "/bin/kill -HUP $MAINPID"
    assert int(entry(unit, "WatchdogSec")) > 0

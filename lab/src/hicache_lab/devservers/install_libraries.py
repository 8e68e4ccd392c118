"""Install the system libraries for Mooncake, and Prometheus and a browser for tests:
`python -m hicache_lab.devservers.install_libraries`.

As root on Debian or Ubuntu it installs the libraries; otherwise it downloads their packages and unpacks them beside
this Python, which then loads them when it starts; this needs no rights. Prometheus is always unpacked, because its
package would start a service. Chromium needs a hundred libraries, so only root can install it.
The exit code is 0 if everything is present, and 1 after a message that names the packages to install by hand.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hicache.backends.mooncake.client import MOONCAKE_LIBRARIES
from hicache.errors import ConfigError, MissingPackage

from .libraries import absent_libraries, load_at_start, unpacked_libraries
from .packages import PROMETHEUS_PROGRAMS, prometheus_program

_TIMEOUT_S = 300


def install(packages: list[str]) -> None:
    """Install `packages`. Raises OSError or SubprocessError."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        _run(["apt-get", *command], environ=environ)


def unpack(packages: list[str], target: Path) -> None:
    """Download `packages` with their dependencies, and put the libraries into `target`. Raises OSError or
    SubprocessError."""
    with tempfile.TemporaryDirectory() as folder:
        _run(["apt-get", "download", "-qq", *_with_dependencies(packages)], directory=folder)
        for archive in Path(folder).glob("*.deb"):
            _run(["dpkg-deb", "-x", str(archive), f"{folder}/unpacked"])
        target.mkdir(parents=True, exist_ok=True)
        # By the name that programs load, usually a link. Network drivers, in subdirectories, are not needed.
        for place in ("lib", "usr/lib"):
            for library in Path(folder, "unpacked", place).glob("*/lib*.so.*"):
                if re.fullmatch(r".*\.so\.[0-9]+", library.name):
                    shutil.copyfile(library, target / library.name)


def unpack_programs(package: str, programs: Sequence[str], target: Path) -> None:
    """Download one package without dependencies, and put its `programs` into `target`. Raises OSError or
    SubprocessError."""
    if os.geteuid() == 0:
        _run(["apt-get", "update", "-qq"])  # container images have no package lists, and only root may download them
    with tempfile.TemporaryDirectory() as folder:
        _run(["apt-get", "download", "-qq", package], directory=folder)
        for archive in Path(folder).glob("*.deb"):
            _run(["dpkg-deb", "-x", str(archive), f"{folder}/unpacked"])
        for name in programs:
            # Copied under a temporary name, so that an interrupted copy is not used as the program.
            shutil.copy(Path(folder, "unpacked/usr/bin", name), target / f".{name}")
            os.replace(target / f".{name}", target / name)


def _with_dependencies(packages: list[str]) -> list[str]:
    """Return `packages` with the dependencies that are not installed. Needs no rights."""
    plan = _run(["apt-get", "install", "--simulate", "--no-install-recommends", *packages])
    # One line per package; an upgrade has its old version in brackets before the new one.
    return list(dict.fromkeys([*packages, *re.findall(r"^Inst (\S+) \(", plan, flags=re.MULTILINE)]))


def missing_packages() -> list[str]:
    """Return the packages of the missing libraries."""
    return [MOONCAKE_LIBRARIES[name] for name in absent_libraries(MOONCAKE_LIBRARIES)]


def _run(command: list[str], *, directory: str | None = None, environ: dict[str, str] | None = None) -> str:
    """Return the output of a command; its stderr is ours."""
    done = subprocess.run(
        command, cwd=directory, env=environ, check=True, timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )
    return done.stdout


def _get_libraries() -> str:
    """Install Mooncake's libraries. Return an empty text, or an error with what to do."""
    missing = missing_packages()
    try:
        if missing and os.geteuid() == 0:
            install(missing)
        elif missing:
            unpack(missing, unpacked_libraries())
        load_at_start(MOONCAKE_LIBRARIES, Path(sysconfig.get_path("purelib")))
    except (OSError, subprocess.SubprocessError, ConfigError) as error:
        return f"{error}\nMooncake needs system libraries; run: sudo apt-get install {' '.join(missing)}"
    return ""


def _get_programs() -> str:
    """As `_get_libraries`, for Prometheus."""
    try:
        for name in PROMETHEUS_PROGRAMS:
            prometheus_program(name)
    except MissingPackage as absent:
        try:
            unpack_programs("prometheus", PROMETHEUS_PROGRAMS, Path(sys.executable).parent)
        except (OSError, subprocess.SubprocessError) as error:
            return f"{error}\n{absent}"
    return ""


def _get_browser() -> str:
    """As `_get_libraries`, for the browser that tests of the daemon's page need; without it they are skipped."""
    if shutil.which("chromium") is not None:
        return ""
    if os.geteuid() != 0:
        return "the tests of the daemon's page need a browser; run: sudo apt-get install chromium"
    try:
        install(["chromium"])
    except (OSError, subprocess.SubprocessError) as error:
        return f"{error}\nthe tests of the daemon's page need a browser: apt-get install chromium"
    return ""


def main() -> int:
    """Install everything and return the exit code."""
    failures = [failure for failure in (_get_libraries(), _get_programs(), _get_browser()) if failure]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

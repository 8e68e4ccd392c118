"""Get the system libraries that Mooncake needs, and the programs of Prometheus and the browser that tests need:
`python -m hicache.devservers.install_libraries`.

As root on Debian or Ubuntu the libraries are installed; otherwise their packages are fetched and unpacked beside this
Python, which takes no rights. The programs of Prometheus are always unpacked: an installed package would start its
service. Chromium needs a hundred libraries, so it is installed, which only root can do.
Ends with 0 if all are there, with 1 after saying which packages to install by hand.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..backends.system_libraries import MOONCAKE_LIBRARIES, absent_libraries, preload, unpacked_libraries
from ..errors import ConfigError, MissingPackage
from .packages import PROMETHEUS_PROGRAMS, prometheus_program

_TIMEOUT_S = 300


def install(packages: list[str]) -> None:
    """Install `packages`. Raises OSError or SubprocessError."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        _run(["apt-get", *command], environ=environ)


def unpack(packages: list[str], target: Path) -> None:
    """Fetch `packages` and what they need, and put their libraries into `target`. Raises OSError or SubprocessError."""
    with tempfile.TemporaryDirectory() as folder:
        _run(["apt-get", "download", "-qq", *_with_dependencies(packages)], directory=folder)
        for archive in Path(folder).glob("*.deb"):
            _run(["dpkg-deb", "-x", str(archive), f"{folder}/unpacked"])
        target.mkdir(parents=True, exist_ok=True)
        # Under the name that programs ask for, mostly a link; drivers of network cards, in folders below, stay out.
        for place in ("lib", "usr/lib"):
            for library in Path(folder, "unpacked", place).glob("*/lib*.so.*"):
                if re.fullmatch(r".*\.so\.[0-9]+", library.name):
                    shutil.copyfile(library, target / library.name)


def unpack_programs(package: str, programs: Sequence[str], target: Path) -> None:
    """Fetch one package without what it needs, and put its `programs` into `target`. Raises OSError or
    SubprocessError."""
    if os.geteuid() == 0:
        _run(["apt-get", "update", "-qq"])  # an image has no lists of packages, and only root may fetch them
    with tempfile.TemporaryDirectory() as folder:
        _run(["apt-get", "download", "-qq", package], directory=folder)
        for archive in Path(folder).glob("*.deb"):
            _run(["dpkg-deb", "-x", str(archive), f"{folder}/unpacked"])
        for name in programs:
            # Under another name first: a copy that is cut off is not taken for the program.
            shutil.copy(Path(folder, "unpacked/usr/bin", name), target / f".{name}")
            os.replace(target / f".{name}", target / name)


def _with_dependencies(packages: list[str]) -> list[str]:
    """`packages`, and what they need that is not installed. To ask takes no rights."""
    plan = _run(["apt-get", "install", "--simulate", "--no-install-recommends", *packages])
    # A line for each package; what is only brought up to date has its old version in brackets before the new one.
    return list(dict.fromkeys([*packages, *re.findall(r"^Inst (\S+) \(", plan, flags=re.MULTILINE)]))


def missing_packages() -> list[str]:
    """The packages of the libraries that the system does not have."""
    return [MOONCAKE_LIBRARIES[name] for name in absent_libraries(MOONCAKE_LIBRARIES)]


def _run(command: list[str], *, directory: str | None = None, environ: dict[str, str] | None = None) -> str:
    """What the command prints; its errors go where ours do."""
    done = subprocess.run(
        command, cwd=directory, env=environ, check=True, timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.stdout


def _get_libraries() -> str:
    """Return an empty text if Mooncake has its libraries now, else why not and what to do."""
    missing = missing_packages()
    try:
        if missing and os.geteuid() == 0:
            install(missing)
        elif missing:
            unpack(missing, unpacked_libraries())
        preload(MOONCAKE_LIBRARIES)
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
    """As `_get_libraries`, for the browser of the tests of the daemon's page, which are skipped without it."""
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
    """The exit code."""
    failures = [failure for failure in (_get_libraries(), _get_programs(), _get_browser()) if failure]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

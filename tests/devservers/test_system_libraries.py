"""Libraries of the system, and those unpacked beside Python because they may not be installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.backends import system_libraries
from hicache.backends.system_libraries import library_path, preload
from hicache.devservers.install_libraries import unpack
from hicache.errors import ConfigError

# Everything here is linked to the C library, so the system has it; nobody has the other one.
THERE = {"libc.so.6": "libc6"}
NOWHERE = {"libhicache-nowhere.so.1": "libhicache1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for unpacked libraries."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    folder = system_libraries.unpacked_libraries()
    folder.mkdir(parents=True)
    return folder


def test_what_the_system_has_needs_nothing(folder: Path) -> None:
    assert library_path(THERE) == {}
    preload(THERE)


@pytest.mark.parametrize("use", [library_path, preload])
def test_a_library_that_is_nowhere_is_refused_with_its_package(use: object, folder: Path) -> None:
    assert callable(use)
    with pytest.raises(ConfigError, match="apt-get install libhicache1"):
        use(NOWHERE)


def test_an_unpacked_library_is_found_by_programs_and_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = next(Path("/").glob("*/*/*/libz.so.1"), None) or next(Path("/").glob("usr/lib/*/libz.so.1"))
    shutil.copyfile(some, folder / "libhicache-nowhere.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "before")
    assert library_path(NOWHERE) == {"LD_LIBRARY_PATH": f"{folder}:before"}
    preload(NOWHERE)
    assert str(folder / "libhicache-nowhere.so.1") in Path("/proc/self/maps").read_text()


def test_an_unpacked_file_that_is_no_library_is_named(folder: Path) -> None:
    (folder / "libhicache-nowhere.so.1").write_bytes(b"no library")
    with pytest.raises(ConfigError, match=r"libhicache-nowhere\.so\.1: was unpacked .* does not load"):
        preload(NOWHERE)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="not a Debian system; install dpkg to run this")
def test_packages_are_unpacked_without_installing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    library = package / "usr/lib/anywhere/libx.so.1.0"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"library")
    (library.parent / "libx.so.1").symlink_to("libx.so.1.0")
    (package / "DEBIAN").mkdir()
    (package / "DEBIAN/control").write_text(
        "Package: libx\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: x\n"
    )
    # Instead of the real one, which needs a mirror: it puts the package where it is called.
    fetcher = tmp_path / "bin/apt-get"
    fetcher.parent.mkdir()
    fetcher.write_text(f'#!/bin/sh\n[ "$1 $3" = "download libx" ] && dpkg-deb --build {package} "$PWD/libx.deb"\n')
    fetcher.chmod(0o700)
    monkeypatch.setenv("PATH", f"{fetcher.parent}:{os.environ['PATH']}")
    unpack(["libx"], tmp_path / "target")
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()} == {"libx.so.1": b"library"}


def test_the_installer_has_nothing_to_do_where_all_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hicache.devservers.install_libraries"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PATH": ""}, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1)
    assert (done.returncode == 0) == (not done.stderr)

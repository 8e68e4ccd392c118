"""Libraries of the system, and those unpacked beside Python because they may not be installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.errors import ConfigError, MissingPackage
from hicache_lab.devservers.install_libraries import unpack, unpack_programs
from hicache_lab.devservers.libraries import load_at_start, only_unpacked, unpacked_libraries
from hicache_lab.devservers.mooncake import library_path
from hicache_lab.devservers.packages import prometheus_program

# Everything here is linked to the C library, so the system has it; nobody has the other one.
THERE = {"libc.so.6": "libc6"}
NOWHERE = {"libhicache-nowhere.so.1": "libhicache1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for unpacked libraries."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    folder = unpacked_libraries()
    folder.mkdir(parents=True)
    return folder


def test_libraries_of_the_system_need_nothing(folder: Path) -> None:
    assert library_path(THERE) == {}
    load_at_start(THERE, folder)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("use", [library_path, only_unpacked])
def test_a_missing_library_is_an_error_that_names_its_package(use: object, folder: Path) -> None:
    assert callable(use)
    with pytest.raises(ConfigError, match="apt-get install libhicache1"):
        use(NOWHERE)


def test_an_unpacked_library_is_found_by_programs_and_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = next(found for top in ("lib", "usr/lib") for found in Path("/", top).glob("*/libz.so.1"))
    shutil.copyfile(some, folder / "libhicache-nowhere.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "before")
    assert library_path(NOWHERE) == {"LD_LIBRARY_PATH": f"{folder}:before"}
    packages = tmp_path / "packages"
    packages.mkdir()
    load_at_start(NOWHERE, packages)
    found = f"site.addsitedir({str(packages)!r}); print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", f"import site; {found}"], capture_output=True, text=True, check=True)
    assert str(folder / "libhicache-nowhere.so.1") in done.stdout and not done.stderr
    shutil.rmtree(folder)
    done = subprocess.run([sys.executable, "-c", f"import site; {found}"], capture_output=True, text=True, check=True)
    assert not done.stderr


def test_an_unpacked_file_that_is_not_a_library_is_named(folder: Path) -> None:
    (folder / "libhicache-nowhere.so.1").write_bytes(b"no library")
    with pytest.raises(ConfigError, match=r"nowhere\.so\.1: was unpacked .* does not load; .* libhicache1"):
        load_at_start(NOWHERE, folder)


APT_GET = """#!/bin/sh
case "$1" in
install)
  [ "$2" = --simulate ] && echo 'Reading state information...
Inst libneeded (1 Debian:12/stable [amd64])
Inst libthere [1] (2 Debian:12/stable [amd64])
Inst libx (1 Debian:12/stable [amd64])
Conf libx (1 Debian:12/stable [amd64])' ;;
download)
  shift 2
  for name in "$@"; do dpkg-deb --build {packages}/$name "$PWD/$name.deb"; done ;;
esac
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages that are offered, instead of a mirror: `apt-get` says what would be installed, and puts
    packages where it is called."""
    fetcher = tmp_path / "bin/apt-get"
    fetcher.parent.mkdir()
    fetcher.write_text(APT_GET.format(packages=tmp_path))
    fetcher.chmod(0o700)
    monkeypatch.setenv("PATH", f"{fetcher.parent}:{os.environ['PATH']}")
    return tmp_path


def make_package(packages: Path, name: str, *files: str) -> None:
    for file in files:
        path = packages / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"library")
    (packages / name / "DEBIAN").mkdir()
    (packages / name / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: x\n"
    )


needs_dpkg = pytest.mark.skipif(
    shutil.which("dpkg-deb") is None, reason="not a Debian system; install dpkg to run this"
)


@needs_dpkg
def test_packages_are_unpacked_without_installing_them(packages: Path) -> None:
    for name in ("libx", "libneeded"):
        folder = f"usr/lib/anywhere/{name}"
        make_package(packages, name, f"{folder}.so.1.0", f"{folder}-alone.so.2")
        (packages / name / f"{folder}.so.1").symlink_to(f"{name}.so.1.0")
    unpack(["libx"], packages / "target")
    found = {path.name: path.read_bytes() for path in (packages / "target").iterdir()}
    names = ["libx.so.1", "libx-alone.so.2", "libneeded.so.1", "libneeded-alone.so.2"]
    assert found == dict.fromkeys(names, b"library")


@needs_dpkg
def test_programs_are_unpacked_alone(packages: Path) -> None:
    make_package(packages, "libx", "usr/bin/wanted", "usr/bin/other", "lib/systemd/system/wanted.service")
    (packages / "target").mkdir()
    unpack_programs("libx", ["wanted"], packages / "target")
    assert [path.name for path in (packages / "target").iterdir()] == ["wanted"]
    with pytest.raises(OSError):
        unpack_programs("libx", ["absent"], packages / "target")


def test_a_missing_program_of_prometheus_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(MissingPackage, match=r"promtool is not installed; .*apt-get install prometheus"):
        prometheus_program("promtool")
    (tmp_path / "promtool").touch(mode=0o700)
    assert prometheus_program("promtool") == tmp_path / "promtool"


def test_the_installer_does_nothing_if_everything_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hicache_lab.devservers.install_libraries"], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PATH": ""}, check=False,
    )
    assert done.returncode in (0, 1)
    assert (done.returncode == 0) == (not done.stderr)

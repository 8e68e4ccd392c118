"""The packages: the wheel has exactly the files of the package, installs and runs; the sdist builds the same wheel.

pip's build isolation installs the build backend from the package index. The installed wheel uses the dependencies of
this environment through a .pth file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import hicache

# A build downloads the build backend into its own environment.
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

ROOT_LINKS = ("backends", "controller", "tiers")

# The only additional file of a wheel: the helper, if there is a compiler.
NATIVE = "hicache/_native.abi3.so"


def _run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environ |= variables
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environ, check=False, timeout=500, stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _build_wheel(source: Path, target: Path, **variables: str) -> Path:
    _run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", target, source,
        cwd=target, **variables,
    )
    (wheel,) = target.glob("hicache-*.whl")
    return wheel


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """Run `make wheel`, which ends with `twine check --strict`, and return its output directory."""
    target = tmp_path_factory.mktemp("dist")
    tools = Path(sys.executable).parent
    # Use the packages of this environment: make does not install any.
    _run("make", "-o", ".venv/.test-stamp", "wheel", f"BIN={tools}", f"DIST={target}", cwd=repository)
    return target


def _only(dist: Path, pattern: str) -> Path:
    (found,) = dist.glob(pattern)
    return found


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """The wheel with the native helper."""
    return _only(dist, "hicache-*-abi3-*.whl")


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    """The source package."""
    return _only(dist, "hicache-*.tar.gz")


def _package_files(repository: Path) -> set[str]:
    built = (".pyc", ".so")
    files = (path for path in (repository / "hicache").rglob("*") if path.is_file() and path.suffix not in built)
    return {str(path.relative_to(repository)) for path in files}


def _shipped_files(repository: Path) -> set[str]:
    """Return the files of the package, and the configurations, which a clone has in `configs/`."""
    return _package_files(repository) | {f"hicache/configs/{path.name}" for path in (repository / "configs").iterdir()}


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path, repository: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - info - {NATIVE} == _shipped_files(repository)
    assert "hicache/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in info)


def test_without_a_compiler_the_wheel_is_pure(repository: Path, tmp_path: Path) -> None:
    wheel = _build_wheel(repository, tmp_path, CC="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert NATIVE not in zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize("variables", [{"CC": "no-such-compiler"}, {"HICACHE_NATIVE": "0"}], ids=str)
def test_a_build_without_the_helper_removes_an_earlier_one(
    repository: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    library = tmp_path / "earlier.so"
    library.touch()
    code = f"from pathlib import Path; import hatch_build as h; print(h.compile_native(Path(), Path({str(library)!r})))"
    assert _run(sys.executable, "-c", code, cwd=repository, **variables) == "False\n"
    assert not library.exists()


def test_the_wheel_with_the_helper_has_a_manylinux_name(wheel: Path, dist: Path) -> None:
    """An index rejects `linux_x86_64`. auditwheel verifies that the library runs on the named systems."""
    assert re.search(r"-cp311-abi3-manylinux2014_\w+\.manylinux_2_17_\w+\.whl$", wheel.name)
    assert NATIVE in zipfile.ZipFile(wheel).namelist()
    assert not [path.name for path in dist.iterdir() if "-linux_" in path.name]


def test_a_library_that_needs_a_newer_system_is_rejected(wheel: Path, tmp_path: Path) -> None:
    """The control for the name: a wheel whose library needs glibc 2.34 does not become manylinux_2_17."""
    source = tmp_path / "newer.c"
    source.write_text("#include <pthread.h>\nint f(void) { return pthread_key_create(0, 0) + pthread_detach(0); }\n")
    _run("cc", "-shared", "-fPIC", source, "-o", tmp_path / "_native.abi3.so", cwd=tmp_path)
    newer = tmp_path / "hicache-0.0-cp311-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as original, zipfile.ZipFile(newer, "w") as changed:
        for name in original.namelist():
            library = (tmp_path / "_native.abi3.so").read_bytes()
            changed.writestr(name, library if name == NATIVE else original.read(name))
    tools = Path(sys.executable).parent
    command = [str(tools / "auditwheel"), "repair", "--only-plat", "--plat", "manylinux_2_17_x86_64", str(newer)]
    environ = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode != 0 and "too-recent versioned symbols" in result.stderr


def test_the_product_has_no_model_and_the_laboratory_has_every_file(dist: Path, wheel: Path, repository: Path) -> None:
    assert wheel.stat().st_size < 4e6
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".safetensors")]
    names = zipfile.ZipFile(_only(dist, "hicache_lab-*.whl")).namelist()
    source = repository / "lab/src"
    files = {path for path in (source / "hicache_lab").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    expected = {str(path.relative_to(source)) for path in files}
    assert {name for name in names if not name.endswith("/") and ".dist-info/" not in name} == expected
    assert {"hicache_lab/engine/assets/model/model.safetensors", "hicache_lab/py.typed"} <= expected
    assert [name for name in names if name.endswith("/licenses/LICENSE")]


def test_the_sdist_has_each_source_once(sdist: Path, repository: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = [member.name.partition("/")[2] for member in members]
    assert not [member.name for member in members if not (member.isfile() or member.isdir())]
    assert not [name for name in names if name.split("/")[0] in ROOT_LINKS]
    assert len(names) == len(set(names)) and _package_files(repository) <= set(names)
    others = {"Makefile", "conftest.py", "constraints.txt", "LICENSE", ".ci/run", "configs/demo.yaml"}
    assert {*others, "lab/pyproject.toml"} <= set(names)


def test_the_sdist_builds_the_same_wheel(dist: Path, wheel: Path) -> None:
    """`make wheel` builds the pure wheel from the sdist and the other one from the source tree."""
    pure = zipfile.ZipFile(_only(dist, "hicache-*-py3-none-any.whl")).namelist()
    assert sorted([*pure, NATIVE]) == sorted(name for name in zipfile.ZipFile(wheel).namelist() if name[-1] != "/")


def test_the_wheel_runs_in_a_new_environment(wheel: Path, tmp_path: Path, repository: Path) -> None:
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    # After the installation, because pip would otherwise find this environment's own hicache. PyTorch and
    # the laboratory are hidden: the machine of a daemon does not have them.
    lines = [sysconfig.get_path("purelib"), "import sys; sys.modules['torch'] = None",
             "import importlib.metadata as m; m.entry_points = lambda **_: ()"]
    (site / "dependencies.pth").write_text("\n".join(lines) + "\n")

    where = _run(python, "-c", "import hicache; print(hicache.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(folder)
    version = _run(folder / "bin/hicache", "--version", cwd=tmp_path)
    assert version == f"hicache, version {hicache.__version__}\n"
    assert "page_size" in _run(folder / "bin/hicache", "config", "schema", cwd=tmp_path)
    assert "until SIGTERM" in _run(folder / "bin/hicache", "serve", "--help", cwd=tmp_path)
    command = [str(folder / "bin/hicache"), "demo"]
    without = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (without.returncode, without.stderr.count("\n")) == (2, 1)
    assert without.stderr.startswith("hicache: demo is in the package hicache-lab; install it")
    ready = _run(folder / "bin/hicache", "config", "init", "redis", cwd=tmp_path)
    assert ready == (repository / "configs/redis.yaml").read_text()

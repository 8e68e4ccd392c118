"""deploy/docker: the Dockerfile passes its linter, the copied files build the package, and command and probe work."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.served import CONFIG, Place, served

HADOLINT = Path(sys.executable).with_name("hadolint")


def dockerfile(repository: Path) -> str:
    """Return the text of the Dockerfile with continued lines joined."""
    return (repository / "deploy/docker/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    """Run the linter on a Dockerfile."""
    return subprocess.run([str(HADOLINT), str(path)], capture_output=True, text=True, timeout=300, check=False)


def stages(repository: Path) -> dict[str, str]:
    """Return the stages of the Dockerfile by name, in order."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", dockerfile(repository), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_linter_accepts_the_dockerfile_and_not_a_wrong_one(repository: Path, tmp_path: Path) -> None:
    path = repository / "deploy/docker/Dockerfile"
    result = lint(path)
    assert result.returncode == 0, result.stdout + result.stderr
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(path.read_text(encoding="utf-8").replace("EXPOSE 9321", "EXPOSE 93210"), encoding="utf-8")
    assert lint(wrong).returncode != 0


def is_ignored(repository: Path, path: Path) -> bool:
    """Return True if .dockerignore excludes a file. The last matching line decides."""
    name, is_out = path.relative_to(repository).as_posix(), False
    for line in (repository / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        tops = [name, *(str(parent) for parent in Path(name).parents)]
        matches = any(fnmatch.fnmatch(top, pattern.removeprefix("**/")) for top in tops) or (
            pattern.startswith("**/") and any(fnmatch.fnmatch(part, pattern[3:]) for part in Path(name).parts)
        )
        if matches:
            is_out = not line.startswith("!")
    return is_out


@pytest.mark.long
def test_the_copied_files_suffice_to_build_the_package(repository: Path, tmp_path: Path) -> None:
    """The test runs the COPY lines of the stage `build` and builds the package from the copies."""
    build = stages(repository)["build"]
    for line in re.findall(r"^COPY (.*)$", build, flags=re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            files = [path for path in [repository / source, *(repository / source).rglob("*")] if path.is_file()]
            kept = [path for path in files if not is_ignored(repository, path)]
            assert kept, f"{source}: .dockerignore excludes all of it"
            for path in kept:
                place = tmp_path / "src" / (path.relative_to(repository))
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place)
    assert not list((tmp_path / "src").rglob("*.so"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), "."]
    subprocess.run(command, cwd=tmp_path / "src", check=True, timeout=500, capture_output=True)
    assert list(tmp_path.glob("hicache-*.whl"))


def test_the_extras_that_images_install_exist(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name for names in re.findall(r'"\.\[([\w,-]+)\]"', dockerfile(repository)) for name in names.split(",")}
    assert {"daemon", "redis", "s3", "mooncake-cpu"} <= extras <= set(project["optional-dependencies"])
    assert not [name for name in project["dependencies"] if name.startswith("torch")], "the daemon needs no PyTorch"


def test_the_default_image_is_the_daemon_and_all_images_have_the_same_user(repository: Path) -> None:
    found = stages(repository)
    assert list(found)[-1] == "daemon"
    users = {
        name: re.findall(r"^USER (.*)$", found[name], flags=re.MULTILINE) for name in ("daemon", "engine", "mooncake")
    }
    assert set(map(tuple, users.values())) == {("10001:10001",)}, "they can share memory only as the same user"


@pytest.mark.servers
def test_the_image_serves_and_its_health_check_detects_a_missing_daemon(repository: Path, tmp_path: Path) -> None:
    """The test runs ENTRYPOINT, CMD, ENV and HEALTHCHECK of the daemon's image. The control: without a daemon the check
    fails."""
    found = stages(repository)
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", found["base"], flags=re.MULTILINE)
    assert json.loads(entrypoint) == ["hicache"] and "XDG_RUNTIME_DIR=/run" in found["base"]
    command, check = (json.loads(text) for text in re.findall(r"(?<!_)CMD (\[.*\])", found["daemon"])[::-1])
    place = Place.make(tmp_path)
    (tmp_path / "etc/daemon.yaml").write_text(
        f"daemon: {{socket: {place.socket}, listen: 127.0.0.1:{place.port}, pool: 0B}}\n"
        f"storage: {{type: file, options: {{path: {tmp_path}/lib/pages, free_space_floor: 0B}}}}\n"
    )
    assert command[-1] == CONFIG and check[0] == "python"
    probe = [sys.executable, *(place.moved(word) for word in check[1:])]
    with served(place, command):
        assert subprocess.run(probe, capture_output=True, timeout=300, check=False).returncode == 0
    assert subprocess.run(probe, capture_output=True, timeout=300, check=False).returncode != 0

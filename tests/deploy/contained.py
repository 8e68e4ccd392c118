"""Containers for tests: a command with the user, the volumes and the read-only root of a deployment file.

A container is a namespace of mounts, network and processes. Its root has only the programs of this machine, the volumes
and the files of the test, so the paths of a deployment file stay as they are.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Docker's /dev/shm, and that of a pod without a volume there.
SHM_MIB = 64
# With its first process, all processes of a process namespace end.
_NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_TIMEOUT_S = 500


@dataclass(frozen=True, slots=True)
class Volume:
    """A file system in memory at `path`, with the owner and the mode that its creator gives it."""

    path: str
    mode: int
    uid: int = 0
    gid: int = 0
    size: str = "1g"


@dataclass(frozen=True, slots=True)
class Step:
    """One command in the container, as a user with exactly these groups and capabilities."""

    command: Sequence[str]
    uid: int
    gid: int
    groups: Sequence[int] = ()
    capabilities: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


def run_contained(
    folder: Path, volumes: Sequence[Volume], files: Mapping[str, str], steps: Sequence[Step], *, read_only: bool
) -> str:
    """Run the steps one after another in one container and return their output. `files` are texts by path, whose
    directories are mounted read-only. Fails if a step does. Skips the test where namespaces are impossible."""
    if os.geteuid() != 0 or subprocess.run([*_NAMESPACES, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces")
    root = folder / "root"
    root.mkdir()
    script = folder / "script"
    script.write_text("\n".join(_script(root, folder, volumes, files, steps, read_only=read_only)), encoding="utf-8")
    result = subprocess.run(
        [*_NAMESPACES, "sh", "-e", str(script)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S, check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def _script(
    root: Path, folder: Path, volumes: Sequence[Volume], files: Mapping[str, str], steps: Sequence[Step], *,
    read_only: bool,
) -> Iterator[str]:
    at = shlex.quote(str(root))

    def bind(path: str, source: str = "") -> Iterator[str]:
        make = "mkdir -p" if os.path.isdir(source or path) else f"mkdir -p {at}/dev; touch"
        yield f"{make} {at}{path}; mount --rbind {shlex.quote(source or path)} {at}{path}"

    yield f"mount -t tmpfs -o mode=755 none {at}"
    for path in ("/usr", "/proc", "/dev/null", "/dev/zero", "/dev/urandom"):
        yield from bind(path)
    for path in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(path):
            yield f"ln -s {os.readlink(path)} {at}{path}"
        elif os.path.isdir(path):
            yield from bind(path)
    for path in sorted({str(ROOT), sys.prefix, sys.base_prefix}):
        if not path.startswith("/usr"):
            yield from bind(path)
    mounted = {volume.path: volume for volume in (Volume("/dev/shm", 0o1777, size=f"{SHM_MIB}m"), *volumes)}
    for volume in mounted.values():
        options = f"mode={volume.mode:o},uid={volume.uid},gid={volume.gid},size={volume.size}"
        yield f"mkdir -p {at}{volume.path}; mount -t tmpfs -o {options} none {at}{volume.path}"
    for path, text in files.items():
        source = folder / "files" / path.strip("/")
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text, encoding="utf-8")
    for parent in sorted({os.path.dirname(path) for path in files}):
        yield from bind(parent, str(folder / "files" / parent.strip("/")))
        yield f"mount -o remount,bind,ro {at}{parent}"
    if read_only:
        yield f"mount -o remount,ro {at}"
    for step in steps:
        kept = "".join(f",+{name.lower()}" for name in step.capabilities)
        environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT),
                   "PYTHONDONTWRITEBYTECODE": "1", **step.environ}
        groups = f"--groups={','.join(map(str, step.groups))}" if step.groups else "--clear-groups"
        yield shlex.join([
            "chroot", str(root), "env", "-i", *(f"{name}={value}" for name, value in environ.items()),
            "setpriv", f"--reuid={step.uid}", f"--regid={step.gid}", groups, f"--bounding-set=-all{kept}",
            f"--inh-caps=-all{kept}", "--no-new-privs", "--", *step.command,
        ])

"""The settings of each deployment file give the daemon its storage: user, groups, owners and modes of the volumes,
read-only root, and /dev/shm. Each test reads them from the file, builds such a container, and stores pages there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.contained import Step, Volume, run_contained
from tests.deploy.served import CONFIG
from tests.deploy.test_kubernetes import FOLDER, UID, configurations, containers, pod_specs, resource, resources
from tests.deploy.test_systemd import UNITS, entry

pytestmark = [pytest.mark.servers, pytest.mark.long]

ENGINE = "/etc/hicache/engine.yaml"
PODS = {name: spec for name, spec in pod_specs() if name != "reference-engine.yaml"}


def small(text: str) -> str:
    """Return a configuration with a small pool, which is allocated at start."""
    return re.sub(r"pool: \d+GiB", "pool: 16MiB", text)


def serving(uid: int, gid: int, command: list[str], text: str, **more: Any) -> Step:
    """Return the step that runs a daemon with this configuration and stores pages through it."""
    root = yaml.safe_load(text)["storage"]["options"]["path"]
    return Step(["python", "-m", "tests.deploy.inside", ENGINE, root, *command], uid, gid, **more)


def volumes_of(spec: Any, mounted: Mapping[str, str]) -> Iterator[Volume]:
    """Yield the volumes of a pod as the kubelet makes them: an emptyDir has mode 0777, and with an fsGroup that group
    and the set-group-ID bit; a directory of the node that it creates has mode 0755. Both belong to root."""
    group = spec["securityContext"].get("fsGroup")
    for volume in spec["volumes"]:
        path = mounted.get(volume["name"])
        if path is None or "configMap" in volume:
            continue
        if "emptyDir" in volume:
            size = str(volume["emptyDir"]["sizeLimit"]).removesuffix("i")
            yield Volume(path, 0o777 if group is None else 0o2777, gid=group or 0, size=size)
        else:
            is_memory = volume["hostPath"]["path"] == "/dev/shm"
            yield Volume(path, 0o1777 if is_memory else 0o755, size="2t")


def pod(name: str, change: str = "") -> tuple[list[Volume], dict[str, str], list[Step]]:
    """Return the volumes, the files and the steps of the daemon's pod in a file, with `change` as the path of its
    store."""
    spec = PODS[name]
    (daemon,) = [one for one in containers(spec) if one.get("args", [""])[0] == "serve"]
    (text,) = [small(text) for file, text in configurations() if file.endswith(name)]
    if change:
        text = re.sub(r"(?m)^( +path: ).*$", rf"\g<1>{change}", text)
    path = FOLDER / name if name == "daemonset.yaml" else FOLDER / "examples" / name
    maps = [one["data"] for one in resources(path) if one["kind"] == "ConfigMap"]
    (texts,) = maps or [resource("examples/reference-engine.yaml", "ConfigMap")["data"]]
    context = spec["securityContext"]
    groups = [context["fsGroup"]] if "fsGroup" in context else []
    steps = []
    for first in spec.get("initContainers", []):
        if first is daemon:
            continue
        own = first["securityContext"]
        step = Step(first["command"], own["runAsUser"], 0, groups, own["capabilities"]["add"])
        steps += [step, step]  # a pod that starts again finds the directories
    environ = {variable["name"]: f"a-token-of-{variable['name']}" for variable in daemon["env"]}
    steps.append(serving(context["runAsUser"], context["runAsGroup"], ["hicache", *daemon["args"]], text,
                         groups=groups, environ=environ))
    assert daemon["securityContext"]["readOnlyRootFilesystem"] and context["runAsUser"] == UID
    mounted = {mount["name"]: mount["mountPath"] for mount in daemon["volumeMounts"]}
    return list(volumes_of(spec, mounted)), {CONFIG: text, ENGINE: texts["engine.yaml"]}, steps


@pytest.mark.parametrize("name", PODS)
def test_the_daemon_of_a_pod_has_storage(tmp_path: Path, name: str) -> None:
    volumes, files, steps = pod(name)
    run_contained(tmp_path, volumes, files, steps, read_only=True)


@pytest.mark.parametrize("fs_group", [True, False], ids=["with fsGroup", "without"])
def test_a_volume_itself_can_be_the_path_of_the_store(tmp_path: Path, fs_group: bool) -> None:
    volumes, files, steps = pod("vllm-sidecar.yaml", "/var/lib/hicache/pages")
    if not fs_group:
        volumes = [Volume(volume.path, 0o777, size=volume.size) for volume in volumes]
    run_contained(tmp_path, volumes, files, steps, read_only=True)


@pytest.mark.parametrize(("path", "advice"), [
    ("/var/lib/hicache/pages", "belongs to user id 0, and you may not create a directory in it; .*set fsGroup"),
    ("/var/lib/hicache/pages/open/store", "pages/open above it is writable by everyone.*mount a volume there"),
])
def test_a_user_without_rights_gets_advice(tmp_path: Path, path: str, advice: str) -> None:
    """The controls: a volume that only root can write, and a directory in it that everyone can write."""
    program = (
        "from tests.backends._files import open_file\n"
        f"from pathlib import Path\ntry: open_file(Path({path!r}))\nexcept Exception as error: print(error)"
    )
    steps = [Step(["sh", "-c", "mkdir -m 0777 /var/lib/hicache/pages/open"], 0, 0),
             Step(["python", "-c", program], UID, UID)]
    output = run_contained(tmp_path, [Volume("/var/lib/hicache/pages", 0o755)], {}, steps, read_only=True)
    assert re.search(advice, output), output


def test_the_daemon_of_compose_has_storage(repository: Path, tmp_path: Path) -> None:
    """A named volume begins as a copy of the directory in the image, with its owner and mode."""
    content = yaml.safe_load((repository / "deploy/compose/compose.yaml").read_text(encoding="utf-8"))
    service = content["services"]["daemon"]
    image = (repository / "deploy/docker/Dockerfile").read_text(encoding="utf-8")
    made = re.search(r"install -d -m (\d+) -o hicache -g hicache (.*)$", image, re.MULTILINE)
    user = re.search(r"^USER (\d+):(\d+)$", image, re.MULTILINE)
    assert made and user and service["read_only"]
    uid, gid = int(user[1]), int(user[2])
    volumes = [Volume(path, int(made[1], 8), uid, gid, "30g") for path in made[2].split()]
    assert {f"{volume.path}" for volume in volumes} <= {one.split(":")[1] for one in service["volumes"]}
    options = dict(one.split("=") for one in content["volumes"]["memory"]["driver_opts"]["o"].split(","))
    volumes.append(Volume("/dev/shm", int(options["mode"], 8), size=options["size"]))
    configs = repository / "deploy/compose/config"
    text = small((configs / "file.yaml").read_text(encoding="utf-8"))
    files = {CONFIG: text, ENGINE: (configs / "engine.yaml").read_text(encoding="utf-8")}
    steps = [serving(uid, gid, ["hicache", *service["command"]], text)]
    run_contained(tmp_path, volumes, files, steps, read_only=True)


@pytest.mark.parametrize("name", UNITS)
def test_the_daemon_of_a_unit_has_storage(repository: Path, tmp_path: Path, name: str) -> None:
    """systemd makes the directories of the unit for its user. ProtectSystem=strict makes the rest read-only."""
    unit = (repository / "deploy/systemd" / name).read_text(encoding="utf-8")
    runtime = f"/run/{entry(unit, 'RuntimeDirectory')}"
    is_system = name == "hicache.service"
    state = f"/var/lib/{entry(unit, 'StateDirectory')}" if is_system else "/var/lib/user"
    state_mode = entry(unit, "StateDirectoryMode") if is_system else "0700"
    modes = {runtime: entry(unit, "RuntimeDirectoryMode"), state: state_mode}
    volumes = [Volume(path, int(mode, 8), UID, UID, "30g") for path, mode in modes.items()]
    text = small((repository / "configs/daemon.yaml").read_text(encoding="utf-8"))
    if is_system:  # docs/deploy.md says so
        text = re.sub(r"(?m)^( +path: ).*$", r"\g<1>/var/lib/hicache/pages", text)
    command = entry(unit, "ExecStart").split()
    engine = json.dumps({"storage": {"type": "remote", "options": {"socket": f"{runtime}/daemon.sock"}}})
    environ = {"XDG_RUNTIME_DIR": "/run", "HOME": state}
    step = serving(UID, UID, ["hicache", *command[1:-1], CONFIG], text, environ=environ)
    run_contained(tmp_path, volumes, {CONFIG: text, ENGINE: engine}, [step], read_only=True)

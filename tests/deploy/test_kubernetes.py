"""deploy/kubernetes: the files pass the schemas of Kubernetes, kustomize renders them, they agree, and a daemon and an
engine work with them."""

from __future__ import annotations

import copy
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hicache.config import load_config
from tests.deploy.served import PORT, Place, served
from tests.test_ready_configs import carries_pages

FOLDER = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
FILES = sorted(path for path in FOLDER.rglob("*.yaml") if path.name not in ("kustomization.yaml", "daemon.yaml"))
# The oldest version with sidecars, and the newest version of the validator.
VERSIONS = ("1.29", "1.37")
UID = 10001
GIB = 1 << 30


def resources(path: Path) -> list[Any]:
    """Return the resources of a file."""
    return [resource for resource in yaml.safe_load_all(path.read_text(encoding="utf-8")) if resource]


def resource(name: str, kind: str) -> Any:
    """Return the only resource of a kind in a file."""
    (found,) = [one for one in resources(FOLDER / name) if one["kind"] == kind]
    return found


def pod_specs() -> Iterator[tuple[str, Any]]:
    """Yield the specification of each pod with the name of its file."""
    for path in FILES:
        for one in resources(path):
            if one["kind"] == "Pod":
                yield path.name, one["spec"]
            elif "template" in one.get("spec", {}):
                yield path.name, one["spec"]["template"]["spec"]


def containers(spec: Any) -> list[Any]:
    """Return all containers of a pod."""
    return [*spec.get("initContainers", []), *spec["containers"]]


# The entries of a PodMonitor that are used here, which the validator does not know (Prometheus operator, "API
# reference", monitoring.coreos.com/v1).
_MONITOR = {
    "apiVersion", "kind", "metadata", "spec", "spec.selector", "spec.selector.matchLabels",
    "spec.selector.matchLabels.app", "spec.podMetricsEndpoints", "spec.podMetricsEndpoints.port",
    "spec.podMetricsEndpoints.path", "spec.podMetricsEndpoints.interval", "spec.podMetricsEndpoints.scrapeTimeout",
    "spec.podMetricsEndpoints.authorization", "spec.podMetricsEndpoints.authorization.credentials",
    "spec.podMetricsEndpoints.authorization.credentials.name",
    "spec.podMetricsEndpoints.authorization.credentials.key", "spec.podMetricsEndpoints.relabelings",
    "spec.podMetricsEndpoints.relabelings.sourceLabels", "spec.podMetricsEndpoints.relabelings.targetLabel",
    "spec.podMetricsEndpoints.relabelings.action",
}


def entries(value: Any, above: str = "") -> Iterator[str]:
    """Yield the paths of all entries of a resource."""
    for part in value if isinstance(value, list) else [value]:
        for name, below in part.items() if isinstance(part, dict) else ():
            yield above + name
            yield from entries(below, f"{above}{name}.")


def validate(one: Any, version: str) -> None:
    """Raise an error if this version of Kubernetes would reject a resource, also for unknown entries."""
    if one["kind"] == "PodMonitor":
        assert one["apiVersion"] == "monitoring.coreos.com/v1"
        assert {name for name in entries(one) if not name.startswith("metadata.")} <= _MONITOR
    else:
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_resource_passes_the_schemas(path: Path, version: str) -> None:
    found = resources(path)
    assert found
    for one in found:
        validate(one, version)


def test_a_misspelled_entry_does_not_pass_the_schemas() -> None:
    wrong = copy.deepcopy(resource("daemonset.yaml", "DaemonSet"))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(wrong, VERSIONS[0])


@pytest.mark.long
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_renders_all_files() -> None:
    result = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, timeout=300, check=True
    )
    rendered = {one["kind"]: one for one in yaml.safe_load_all(result.stdout)}
    assert set(rendered) == {
        "Namespace", "ServiceAccount", "ConfigMap", "DaemonSet", "Service", "NetworkPolicy", "PodMonitor",
    }
    for one in rendered.values():
        validate(one, VERSIONS[-1])
    spec = rendered["DaemonSet"]["spec"]["template"]["spec"]
    (volume,) = [volume for volume in spec["volumes"] if "configMap" in volume]
    assert volume["configMap"]["name"] == rendered["ConfigMap"]["metadata"]["name"] != "hicache-daemon", "has no hash"
    assert rendered["ConfigMap"]["data"] == {"daemon.yaml": (FOLDER / "daemon.yaml").read_text(encoding="utf-8")}
    assert {container["image"] for container in containers(spec)} == {"registry.example/hicache:0.1.0"}


def test_the_kustomization_names_each_file() -> None:
    content = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    assert set(content["resources"]) == {path.name for path in FILES if path.parent == FOLDER}


@pytest.mark.parametrize(("name", "spec"), list(pod_specs()), ids=[name for name, _ in pod_specs()])
def test_containers_have_no_privileges_and_run_as_one_user(name: str, spec: Any) -> None:
    """All containers have one user, because they share memory; only the one that makes directories is root."""
    context = spec["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (UID, True)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    for container in containers(spec):
        own = container["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
        assert own["capabilities"]["drop"] == ["ALL"]
        is_root = name == "daemonset.yaml" and container["name"] == "directories"
        assert own.get("runAsUser", UID) == (0 if is_root else UID)
        assert {"requests", "limits"} == set(container["resources"])
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@pytest.mark.parametrize(("name", "spec"), list(pod_specs()), ids=[name for name, _ in pod_specs()])
def test_engine_and_daemon_mount_the_same_memory_and_socket(name: str, spec: Any) -> None:
    """Different pods share directories of the node; containers of one pod share an emptyDir in memory."""
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for container in containers(spec):
        if container["name"] == "directories":
            continue
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        if "sidecar" in name:
            assert mounts["/dev/shm"]["emptyDir"]["medium"] == mounts["/run/hicache"]["emptyDir"]["medium"] == "Memory"
        else:
            assert mounts["/dev/shm"]["hostPath"]["path"] == "/dev/shm"
            assert mounts["/run/hicache"]["hostPath"]["path"] == "/run/hicache"


def test_the_files_agree_about_ports_and_secrets() -> None:
    spec = resource("daemonset.yaml", "DaemonSet")["spec"]["template"]["spec"]
    (daemon,) = spec["containers"]
    assert daemon["ports"] == [{"name": "http", "containerPort": PORT}]
    (port,) = resource("service.yaml", "Service")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (PORT, "http")
    (rule,) = resource("networkpolicy.yaml", "NetworkPolicy")["spec"]["ingress"]
    assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]
    monitor = resource("podmonitor.yaml", "PodMonitor")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] == "http" and monitor["selector"]["matchLabels"] == {"app": "hicache-daemon"}
    made = set(re.findall(r"--from-literal=([\w-]+)=", (FOLDER / "kustomization.yaml").read_text(encoding="utf-8")))
    used = {entry["valueFrom"]["secretKeyRef"]["key"] for entry in daemon["env"]}
    assert made == used == {"token", "admin-token"} and endpoint["authorization"]["credentials"]["key"] in made


def test_the_memory_limit_has_room_for_pool_and_staging() -> None:
    config = load_config(FOLDER / "daemon.yaml", environ={}, overrides={}).daemon
    (daemon,) = resource("daemonset.yaml", "DaemonSet")["spec"]["template"]["spec"]["containers"]
    limit = int(daemon["resources"]["limits"]["memory"].removesuffix("Gi")) * GIB
    assert isinstance(config.pool, int) and config.pool + config.staging + 2 * GIB <= limit


def configurations() -> Iterator[tuple[str, str]]:
    """Yield the configuration of each daemon with the name of its file."""
    yield "daemonset.yaml", (FOLDER / "daemon.yaml").read_text(encoding="utf-8")
    for path in FILES:
        for one in resources(path):
            if one["kind"] == "ConfigMap" and "daemon.yaml" in one["data"]:
                yield f"examples/{path.name}", one["data"]["daemon.yaml"]


@pytest.mark.servers
def test_the_daemon_serves_an_engine_with_the_files(tmp_path: Path) -> None:
    """The daemon runs with the container's arguments and variables and the configuration of its ConfigMap, which
    `config check` accepts. The probes need no token, pages need it. The engine of the example stores pages.
    test_contained.py runs the daemon of each pod."""
    name, text = next(configurations())
    place = Place.make(tmp_path)
    (tmp_path / "etc/daemon.yaml").write_text(place.moved(text), encoding="utf-8")
    specs = [spec for file, spec in pod_specs() if name.endswith(file)]
    (daemon,) = [one for spec in specs for one in containers(spec) if one.get("args", [""])[0] == "serve"]
    environ = {entry["name"]: secrets.token_hex(16) for entry in daemon["env"]}
    check = [sys.executable, "-m", "hicache", "config", "check", str(tmp_path / "etc/daemon.yaml")]
    subprocess.run(check, check=True, capture_output=True, timeout=300)
    demo = resource("examples/reference-engine.yaml", "ConfigMap")["data"]["engine.yaml"]
    (tmp_path / "engine.yaml").write_text(place.moved(demo), encoding="utf-8")
    with served(place, daemon["args"], environ):
        paths = {daemon[probe]["httpGet"]["path"] for probe in daemon if probe.endswith("Probe")}
        assert paths == {"/livez", "/readyz"}
        assert {place.get(path, port=place.port) for path in paths} == {200}
        usage = f"/v1/namespaces/{'0' * 64}/usage"
        assert place.get(usage, port=place.port) == 401
        assert place.get(usage, port=place.port, token=environ["DAEMON_TOKEN"]) == 404
        assert carries_pages(tmp_path / "engine.yaml")
        # docs/deploy.md tells operators to run this command in the container.
        command = [sys.executable, "-m", "hicache", "ctl", "-c", str(tmp_path / "etc/daemon.yaml"), "status"]
        status = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=300, env=os.environ | environ
        )
        assert "ready" in status.stdout

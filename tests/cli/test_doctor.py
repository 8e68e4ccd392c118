"""`hicache doctor`: what it finds on this machine and in real stores, and that it leaves nothing there."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from hicache.backends.registry import BackendSpec, open_stored
from hicache.cli import doctor_probe, doctor_stores
from hicache.cli.doctor_machine import Verdict, gpu
from hicache.cli.doctor_stores import volume
from hicache.cli.main import main
from hicache.config import FileStorageOptions
from hicache_lab.devservers import DevService, SeaweedServer, ValkeyServer
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from tests.certificates import ending_certificate, make_certificates
from tests.cli.processes import TIMEOUT_S, finish, start
from tests.daemon.daemons import Daemon
from tests.fuse import mounted
from tests.waiting import wait_for

VERDICTS = {"ok", "info", "warn", "fail"}
SMALL = ["--set", "host.size=64MiB", "--set", "page_size=1"]  # pages of 128 KiB
STRANGE = "tests.cli.strange_stores"


def doctor(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", "-c", str(path), *SMALL, *arguments])


def rows(result: Result) -> dict[str, dict[str, Any]]:
    """Return the rows of a result in JSON by their names, after a check of the document."""
    assert result.exit_code in (0, 1), (result.output, result.exception)
    document = json.loads(result.stdout)
    assert set(document) == {"version", "failed", "rows"}
    for row in document["rows"]:
        assert set(row) == {"check", "verdict", "finding", "advice", "figures"}
        assert row["verdict"] in VERDICTS and row["finding"] and "bug" not in row["advice"]
    failed = any(row["verdict"] == "fail" for row in document["rows"])
    assert (document["failed"], result.exit_code) == (failed, int(failed))
    return {row["check"]: row for row in document["rows"]}


def configured(folder: Path, storage: dict[str, Any] | None, **sections: Any) -> Path:
    path = folder / "hicache.yaml"
    path.write_text(yaml.safe_dump({"storage": storage, **sections}))
    return path


def file_storage(folder: Path, **options: Any) -> dict[str, Any]:
    return {"type": "file", "options": {"path": str(folder / "pages"), "free_space_floor": 0, **options}}


def page_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and len(path.name) == 64]


# The machine


def test_without_storage_only_the_machine_is_checked(tmp_path: Path) -> None:
    found = rows(doctor(configured(tmp_path, None), "--json"))
    assert [*found] == [
        "configuration", "versions", "clock", "memory", "/dev/shm", "memlock", "device", "numa", "storage"
    ]
    assert found["versions"]["figures"]["numpy"] and found["storage"]["verdict"] == "info"


@pytest.mark.parametrize("entry", ["host.size", "daemon.pool", "daemon.staging"])
def test_a_size_that_the_machine_does_not_have_fails_and_the_advice_names_it(tmp_path: Path, entry: str) -> None:
    found = rows(doctor(configured(tmp_path, None), "--set", f"{entry}=512TiB", "--json"))["memory"]
    assert (found["verdict"], found["figures"]["needed"] >> 40) == ("fail", 512)
    assert found["finding"].count("512.0 TiB") == 2 and found["advice"].startswith(f"lower {entry} to at most ")


def test_a_share_of_memory_is_shown_with_its_size_and_judged_by_it(tmp_path: Path) -> None:
    path, half = configured(tmp_path, None), ("--json", "--set", "host.size=50%")
    found = rows(doctor(path, *half))["memory"]
    figures = found["figures"]
    assert found["verdict"] == "ok" and "(host.size 50% = " in found["finding"]
    assert 0.45 <= figures["needed"] / figures["available"] <= 0.55  # the machine has changed between two looks
    found = rows(doctor(path, *half, "--set", "daemon.pool=95%"))["memory"]
    assert found["verdict"] == "fail" and "daemon.pool 95% = " in found["finding"]
    assert found["advice"].startswith("lower daemon.pool to at most ")
    named = rows(doctor(path, *half, "--set", "host.shared.name=hicache-doctor-test"))["/dev/shm"]
    assert named["verdict"] == "ok" and named["figures"]["needed"] <= 0.55 * named["figures"]["free"]


def test_host_tokens_and_a_ratio_are_sizes_once_the_model_is_known(tmp_path: Path) -> None:
    path = configured(tmp_path, None, host={"ratio": 4}, device={"tokens": 1 << 30})
    result = CliRunner().invoke(main, ["doctor", "-c", str(path), "--model", "qwen3-8b", "--json"])
    assert rows(result)["memory"]["figures"]["needed"] == 4 * (1 << 30) * 144 * 1024
    assert rows(CliRunner().invoke(main, ["doctor", "-c", str(path), "--json"]))["memory"]["verdict"] == "info"


def test_shared_memory_larger_than_its_mount_fails(tmp_path: Path) -> None:
    path = configured(tmp_path, None, host={"shared": {"name": "hicache-doctor-test"}})
    assert rows(doctor(path, "--json"))["/dev/shm"]["verdict"] == "ok"
    found = rows(doctor(path, "--set", "host.size=512TiB", "--json"))["/dev/shm"]
    assert found["verdict"] == "fail" and "--shm-size" in found["advice"]


def test_rdma_needs_locked_memory(tmp_path: Path) -> None:
    options = {"protocol": "rdma", "segment": "100TiB", "master": f"{LOOPBACK}:{free_ports(1)[0]}"}
    found = rows(doctor(configured(tmp_path, {"type": "mooncake", "options": options}), "--json"))
    assert found["memlock"]["figures"]["needed"] > 100 << 40
    assert found["memory"]["verdict"] == found["mooncake"]["verdict"] == "fail"


def test_certificates_show_their_end_and_an_unreadable_one_fails(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    tls = {"certificate": str(made.cert_file), "key": str(made.key_file)}
    found = rows(doctor(configured(tmp_path, None, daemon={"tls": tls}), "--json"))["daemon.tls.certificate"]
    assert (found["verdict"], found["advice"]) == ("warn", "renew it"), "it ends tomorrow"
    made.cert_file.write_text("no certificate")
    assert rows(doctor(tmp_path / "hicache.yaml", "--json"))["daemon.tls.certificate"]["verdict"] == "fail"


def test_an_expired_certificate_of_a_chain_fails_and_one_of_a_bundle_of_authorities_does_not(tmp_path: Path) -> None:
    (tmp_path / "both.pem").write_bytes(ending_certificate(-1) + ending_certificate(99))
    (tmp_path / "key.pem").touch(mode=0o600)
    tls = {"certificate": "both.pem", "key": "key.pem", "client_ca": "both.pem"}
    sections = {"tls": {name: str(tmp_path / file) for name, file in tls.items()}}
    found = rows(doctor(configured(tmp_path, None, daemon=sections), "--json"))
    assert found["daemon.tls.certificate"]["verdict"] == "fail"
    assert found["daemon.tls.client_ca"]["verdict"] == "ok"


def test_a_device_is_compared_with_the_size_of_l1() -> None:
    class Cuda:
        def mem_get_info(self, number: int) -> tuple[int, int]:
            return 60 << 30, 80 << 30

        def get_device_name(self, number: int) -> str:
            return f"a device {number}"

    found = {need: gpu(Cuda(), 1, "0000:3b:00.0", need and need << 30) for need in (None, 40, 70, 90)}
    assert [row.verdict.value for row in found.values()] == ["ok", "ok", "warn", "fail"]
    assert found[90].check == "device cuda:1" and "90.0 GiB" in found[90].finding and found[90].advice


# Stores


def test_a_file_store_is_measured_and_nothing_stays_in_it(tmp_path: Path) -> None:
    found = rows(doctor(configured(tmp_path, file_storage(tmp_path)), "--json"))
    figures = found["file"]["figures"]
    assert found["file"]["verdict"] == "ok" and figures["page"] == 128 << 10 and figures["left"] == 0
    assert all(figures[name] > 0 for name in ("open_s", "write_s", "read_s", "remove_s", "read_bytes_per_s"))
    assert figures["read_page_s"] > 0 and figures["read_fixed_s"] >= 0 and figures["read_pages"] == 16
    assert found["file volume"]["figures"]["free"] > 0
    assert (tmp_path / "pages").is_dir() and not page_files(tmp_path)


def test_the_table_fits_into_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = configured(tmp_path, file_storage(tmp_path), host={"size": "512TiB"})
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = CliRunner().invoke(main, ["doctor", "-c", str(path), "--set", "page_size=1"])
        lines = result.stdout.splitlines()
        assert result.exit_code == 1 and max(map(len, lines)) <= columns
        assert lines[0].split() == ["VERDICT", "CHECK", "FINDING,", "AND", "ADVICE"]
        assert any(line.split()[:2] == ["fail", "memory"] for line in lines)
        assert any("-> lower host.size" in line for line in lines) and lines[-1].startswith("1 failed, ")


def test_each_part_of_a_composition_has_its_own_rows(tmp_path: Path) -> None:
    parts = [{"name": "ram", "type": "memory", "options": {"capacity": 16 << 20}},
             {"name": "disk", **file_storage(tmp_path)}]
    found = rows(doctor(configured(tmp_path, {"type": "levels", "options": {"levels": parts}}), "--json"))
    assert found["ram"]["verdict"] == found["disk"]["verdict"] == "ok"
    assert found["memory"]["figures"]["needed"] == (64 << 20) + (16 << 20)


def test_a_full_volume_and_a_floor_above_it_fail_with_the_numbers(tmp_path: Path) -> None:
    found = rows(doctor(configured(tmp_path, file_storage(tmp_path, free_space_floor="512TiB")), "--json"))
    assert found["file volume"]["verdict"] == "fail" and "free_space_floor" in found["file volume"]["advice"]
    assert found["file"]["verdict"] == "fail" and "rejected" in found["file"]["finding"]
    large = file_storage(tmp_path, capacity="512TiB")
    found = rows(doctor(configured(tmp_path, large), "--json"))
    assert (found["file volume"]["verdict"], found["file"]["verdict"]) == ("warn", "ok")


def test_a_volume_in_memory_is_a_warning() -> None:
    options = FileStorageOptions(path=Path("/dev/shm/none/pages"), capacity=None, free_space_floor=0)
    found = volume("file", options, 0)
    assert (found.figures["system"], found.verdict) == ("tmpfs", Verdict.WARN) and "mount a disk" in found.advice


def test_a_volume_that_machines_share_is_a_warning_and_the_store_is_tried(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir(mode=0o700)
    with mounted(tmp_path / "source", tmp_path / "shared"):
        storage = file_storage(tmp_path / "shared", free_space_floor=0)
        found = rows(doctor(configured(tmp_path, storage), "--json"))
        assert (found["file volume"]["verdict"], found["file"]["verdict"]) == ("warn", "ok")
        assert "shared_files" in found["file volume"]["advice"]
        assert found["file volume"]["figures"]["system"].startswith("fuse")


def test_a_store_smaller_than_a_page_fails(tmp_path: Path) -> None:
    path = configured(tmp_path, file_storage(tmp_path, capacity="1MiB"))
    found = rows(CliRunner().invoke(main, ["doctor", "-c", str(path), "--set", "host.size=64MiB", "--json"]))
    assert found["file"]["verdict"] == "fail" and "is below one page" in found["file"]["finding"]


def test_a_directory_of_others_fails_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "mine").touch()
    found = rows(doctor(configured(tmp_path, file_storage(tmp_path)), "--json"))["file"]
    assert found["verdict"] == "fail" and "pages" in found["finding"]


def test_a_missing_key_fails_and_the_other_rows_stay(tmp_path: Path) -> None:
    path = configured(tmp_path, file_storage(tmp_path), integrity={"mac_key_env": "NO_SUCH_KEY"})
    found = rows(doctor(path, "--json"))
    assert found["storage"]["verdict"] == "fail" and "NO_SUCH_KEY" in found["storage"]["finding"]
    assert found["memory"]["verdict"] == "ok"


def test_redis_is_checked_and_left_without_a_key(valkey: ValkeyServer, tmp_path: Path, unique_prefix: str) -> None:
    kind, options = valkey.storage(key_prefix=unique_prefix)
    found = rows(doctor(configured(tmp_path, {"type": kind, "options": options}), "--json"))
    assert found["redis"]["verdict"] == "ok" and found["redis access"]["finding"] == "user default, password none"
    with valkey.client() as client:
        assert not client.keys(f"{unique_prefix}*")


def test_a_wrong_password_fails_and_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ValkeyServer(password="right-password") as server:
        monkeypatch.setenv("DOCTOR_PASSWORD", "wrong-password")
        options = {"url": f"redis://{LOOPBACK}:{server.port}", "password_env": "DOCTOR_PASSWORD"}
        result = doctor(configured(tmp_path, {"type": "redis", "options": options}), "--json")
        found = rows(result)
    assert found["redis"]["verdict"] == "fail" and "wrong_credentials" in found["redis"]["finding"]
    assert "DOCTOR_PASSWORD" in found["redis access"]["finding"] and "wrong-password" not in result.output


def test_s3_shows_source_of_the_keys_and_the_servers_clock(
    seaweed: SeaweedServer, tmp_path: Path, unique_prefix: str, login: Callable[[DevService], None]
) -> None:
    login(seaweed)
    kind, options = seaweed.storage(prefix=unique_prefix)
    found = rows(doctor(configured(tmp_path, {"type": kind, "options": options}), "--json"))
    assert found["s3"]["verdict"] == "ok" and found["s3 clock"]["verdict"] == "ok"
    assert options["access_key_env"] in found["s3 access"]["finding"]
    assert found["s3 versions"]["verdict"] == "ok"
    raw = open_stored(BackendSpec(kind, options))
    try:
        assert not list(raw.pages())
    finally:
        raw.close()


def test_a_bucket_that_keeps_versions_is_a_warning_until_they_are_suspended(
    seaweed: SeaweedServer, tmp_path: Path, login: Callable[[DevService], None]
) -> None:
    login(seaweed)
    kind, options = seaweed.storage()
    client, bucket = seaweed.client(), "with-versions"
    client.create_bucket(Bucket=bucket)
    path = configured(tmp_path, {"type": kind, "options": {**options, "bucket": bucket}})
    for status, verdict in ("Enabled", "warn"), ("Suspended", "ok"):
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})
        assert rows(doctor(path, "--json"))["s3 versions"]["verdict"] == verdict
    client.close()


def test_a_daemon_and_its_engine_are_checked(tmp_path: Path) -> None:
    with Daemon(tmp_path, storage=file_storage(tmp_path)) as daemon:
        storage = {"type": "remote", "options": {"socket": str(daemon.socket)}}
        found = rows(doctor(configured(tmp_path, storage), "--json"))
        status = daemon.status()
        assert found["remote"]["verdict"] == "ok"
        assert found["remote daemon"]["figures"]["instance"] == status["instance"]
        assert [(one["label"], one["pool_bytes"]) for one in status["namespaces"]] == [("hicache doctor", 0)]
        own = rows(CliRunner().invoke(main, ["doctor", "-c", str(daemon.config_file), "--json"]))
        assert "runs it now" in own["configuration"]["finding"] and own["file"]["verdict"] == "ok"
        assert "/dev/shm" not in own, "L2 is an engine's"
    assert "not running" in rows(doctor(daemon.config_file, "--json"))["configuration"]["finding"]
    assert not page_files(tmp_path / "pages")


@pytest.mark.parametrize("storage", [
    {"type": "redis", "options": {"url": "redis://HERE"}},
    {"type": "remote", "options": {"url": "http://HERE"}},
    {"type": "s3", "options": {"bucket": "bucket", "endpoint_url": "http://HERE", "access_key_env": "HOME",
                               "secret_key_env": "HOME", "timeout": "2s"}},
], ids=lambda storage: storage["type"])
def test_a_dead_and_a_silent_server_are_failed_rows(
    tmp_path: Path, storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (doctor_probe, doctor_stores):
        monkeypatch.setattr(module, "CALL_S", 0.5)
    with socket.create_server((LOOPBACK, 0)) as silent:
        for port in (free_ports(1)[0], silent.getsockname()[1]):
            text = json.dumps(storage).replace("HERE", f"{LOOPBACK}:{port}")
            path = tmp_path / "hicache.yaml"
            path.write_text(json.dumps({"storage": json.loads(text)}))
            found = rows(doctor(path, "--json"))
            failed = [name for name, row in found.items() if row["verdict"] == "fail"]
            assert failed and all(name.startswith(storage["type"]) for name in failed)
            words = " ".join(found[name]["finding"] + found[name]["advice"] for name in failed)
            assert any(advice in words for advice in ("start the ", "check ", "see whether", "see its log"))


@pytest.mark.parametrize(("kind", "finding", "advice"), [
    ("LyingStore", "other bytes", ""),
    ("KeepingStore", "could not be removed", "hicache purge STORE --namespace "),
])
def test_a_store_that_breaks_its_contract_fails(tmp_path: Path, kind: str, finding: str, advice: str) -> None:
    found = rows(doctor(configured(tmp_path, {"type": f"{STRANGE}:{kind}"}), "--json"))[f"{STRANGE}:{kind}"]
    assert found["verdict"] == "fail" and finding in found["finding"] and advice in found["advice"]


def test_an_unexpected_exception_is_a_failed_row(tmp_path: Path) -> None:
    result = doctor(configured(tmp_path, {"type": f"{STRANGE}:RaisingStore"}), "--json")
    found = {row["check"]: row for row in json.loads(result.stdout)["rows"]}[f"{STRANGE}:RaisingStore"]
    assert (result.exit_code, found["verdict"], found["finding"]) == (1, "fail", "KeyError: 'odd'")


@pytest.mark.long
def test_a_store_that_never_opens_is_a_failed_row_and_the_command_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = configured(tmp_path, {"type": f"{STRANGE}:HangingStore"})
    code = "from hicache.cli import doctor, main\ndoctor._STORE_S = doctor._END_S = 0.2\nmain.main()"
    command = [sys.executable, "-c", code, "doctor", "-c", str(path), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1 and "its check was abandoned" in done.stdout


@pytest.fixture
def pausing(repository: Path, tmp_path: Path) -> Iterator[Callable[[int], tuple[int, str]]]:
    """Return a function that runs the command, sends it a signal when pages are stored, and returns code and output."""
    options = {"path": str(tmp_path / "pages"), "folder": str(tmp_path)}
    path = configured(tmp_path, {"type": f"{STRANGE}:PausingStore", "options": options})
    process = start(repository, "doctor", "-c", str(path), *SMALL)

    def run(number: int) -> tuple[int, str]:
        wait_for(lambda: (tmp_path / "stored").exists() or process.poll() is not None)
        assert page_files(tmp_path / "pages"), "the negative control: without a removal they stay"
        process.send_signal(number)
        (tmp_path / "go").touch()
        return finish(process)

    yield run
    process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_a_signal_no_page_stays_in_the_store(
    tmp_path: Path, pausing: Callable[[int], tuple[int, str]], number: int
) -> None:
    code, output = pausing(number)
    assert code == 130, output
    assert not page_files(tmp_path / "pages")


# Whether hits pay


@pytest.mark.parametrize(("prefill", "verdict", "decision"), [(2, "ok", "pays"), (10**9, "warn", "too_slow")])
def test_break_even_is_decided_for_the_model(tmp_path: Path, prefill: int, verdict: str, decision: str) -> None:
    path = configured(tmp_path, file_storage(tmp_path))
    found = rows(doctor(path, "--model", "llama-3.1-8b", "--prefill", str(prefill), "--json"))["file pays"]
    assert (found["verdict"], found["figures"]["decision"]) == (verdict, decision)
    assert found["figures"]["token_bytes"] == 128 << 10 and "128.0 KiB" in found["finding"]
    assert "on an idle device" in found["finding"]
    assert ("break_even.mode: always" in found["advice"]) == (decision == "too_slow")
    ratio, wait_s = found["figures"]["ratio"], found["figures"]["wait_s"]
    # The wait is the time by which fetching 8,192 tokens exceeds computing them.
    assert wait_s == pytest.approx(max(0.0, ratio - 1) * 8192 / prefill)
    assert (f"waits at least {wait_s * 1e3:,.1f} ms for the device anyway, it pays" in found["finding"]) == (wait_s > 0)
    assert ratio == pytest.approx(prefill / found["figures"]["prefill_max"]), "up to that speed, hits pay"


def test_without_a_prefill_speed_the_row_says_up_to_which_speed_hits_pay(tmp_path: Path) -> None:
    path = configured(tmp_path, file_storage(tmp_path))
    found = rows(doctor(path, "--model", "llama-3.1-8b", "--json"))["file pays"]
    assert found["verdict"] == "info" and f"{found['figures']['prefill_max']:,.0f} tokens/s" in found["finding"]
    assert doctor(path, "--prefill", "1").exit_code == doctor(path, "--model", "no-such-model").exit_code == 2


@pytest.mark.long
def test_every_ready_configuration_gets_rows(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_EC2_METADATA_DISABLED", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "true")  # no request to a metadata service, no files of this user
    for ready in sorted((repository / "configs").glob("*.yaml")):
        text = ready.read_text(encoding="utf-8")
        for folder in ("/var/lib/hicache", "/mnt/", "/srv/"):
            text = text.replace(folder, f"{tmp_path}/stores/")
        path = tmp_path / ready.name
        path.write_text(text, encoding="utf-8")
        assert len(rows(doctor(path, "--json"))) > 6, ready.name
    assert not page_files(tmp_path)

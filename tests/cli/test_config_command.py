"""`hicache config`: its output for valid and invalid configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hicache.cli.main import main
from hicache.config import load_config
from hicache.config.entries import all_entries
from hicache.config.ready import ready_files
from tests.fuse import mounted


def invoke(*args: str, **environ: str) -> Result:
    return CliRunner().invoke(main, ["config", *args], env=environ)


def test_check_prints_the_effective_configuration_as_yaml_and_ok_on_stderr(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text("host: {size: 2048MiB}\n")
    result = invoke("check", str(file), "--set", "page_size=16", HICACHE_TRANSFER__STORAGE_DEADLINE="0.5s")
    effective = result.stdout
    assert (result.exit_code, result.stderr) == (0, "ok\n")
    assert "size: 2GiB" in effective and "storage_deadline: 500ms" in effective and "page_size: 16" in effective
    file.write_text(effective)
    assert load_config(file, environ={}, overrides={}).page_size == 16


def test_check_of_an_invalid_configuration_lists_its_problems_and_fails(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("page_size: 0\nhots: {}\n")
    result = invoke("check", str(file))
    assert result.exit_code == 1 and not result.stdout
    lines = result.stderr.splitlines()
    assert lines[0] == "hicache: the configuration has 2 problems:" and len(lines) == 3
    assert "did you mean host?" in result.stderr


@pytest.mark.parametrize(
    ("backend", "hint"),
    [("fiel", "did you mean 'file'?"), ("pigeon", ", file, levels, "), ("nomod:Cls", "No module named 'nomod'"),
     ("json:loads", "is not a Driver"), ("hicache.backends.memory:Nothing", "cannot be loaded")],
)
def test_check_looks_for_the_storage_backend(tmp_path: Path, backend: str, hint: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"storage: {{type: '{backend}'}}\n")
    result = invoke("check", str(file))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"storage: backend {backend}" in result.stderr.replace("'", "", 2) and hint in result.stderr


def test_check_accepts_backends_that_exist_and_opens_none(tmp_path: Path) -> None:
    file, store = tmp_path / "x.yaml", tmp_path / "store"
    for storage in (f"{{type: file, options: {{path: {store}}}}}", "{type: memory, options: {capacity: 5}}",
                    "{type: 'hicache.backends.memory:open_memory'}"):
        file.write_text(f"storage: {storage}\n")
        assert invoke("check", str(file)).exit_code == 0
    assert not store.exists()
    file.write_text("storage: {type: memory, options: {capacity_bytes: 5}}\n")
    assert "did you mean 'capacity'?" in invoke("check", str(file)).stderr


def test_check_warns_of_a_file_store_on_a_file_system_that_machines_share(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    file, disk, shared = tmp_path / "x.yaml", tmp_path / "disk", tmp_path / "shared"
    file.write_text(f"""storage:
  type: levels
  options:
    levels:
    - {{name: near, type: file, options: {{path: {disk}}}}}
    - {{name: far, type: file, options: {{path: {shared}/missing/pages}}}}
""")
    with mounted(tmp_path / "source", shared):
        result = invoke("check", str(file))
        assert not list((tmp_path / "source").iterdir())
    assert result.exit_code == 0
    warning, ok = result.stderr.splitlines()
    assert warning.startswith(f"hicache: warning: store far: the file system of {shared}/missing/pages is fuse")
    assert ok == "ok" and "shared_files" in warning
    assert invoke("check", str(file)).stderr == "ok\n", "the control: the mount has ended"


def test_check_warns_of_a_daemon_that_needs_more_memory_than_is_available(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("daemon: {pool: 95%, staging: 4TiB}\nstorage: {type: memory}\n")
    result = invoke("check", str(file))
    assert result.exit_code == 0
    assert "for daemon.pool (95%) and 4.0 TiB for daemon.staging are needed" in result.stderr
    file.write_text("daemon: {pool: 1MiB, staging: 1MiB}\nstorage: {type: memory}\n")
    assert invoke("check", str(file)).stderr == "ok\n", "the control"


def test_check_reads_key_files_and_no_variables(tmp_path: Path) -> None:
    key, file = tmp_path / "one.key", tmp_path / "x.yaml"
    file.write_text("storage_format: {encryption_key_env: NOT_SET_HERE}\n")
    assert invoke("check", str(file)).exit_code == 0
    file.write_text(f"storage_format: {{encryption_key_file: {key}}}\n")
    result = invoke("check", str(file))
    assert result.exit_code == 1 and "storage_format.encryption_key_file: " in result.stderr
    key.write_text("ab" * 32)
    key.chmod(0o600)
    assert invoke("check", str(file)).exit_code == 0


def test_check_reads_the_mac_key_file(tmp_path: Path) -> None:
    key, file = tmp_path / "mac.key", tmp_path / "x.yaml"
    file.write_text(f"integrity: {{mac_key_file: {key}}}\nstorage: {{type: fiel}}\n")
    lines = invoke("check", str(file)).stderr.splitlines()
    assert lines[0] == "hicache: the configuration has 2 problems:"
    assert "integrity.mac_key_file: " in lines[2] and "No such file" in lines[2]
    key.write_text("ab" * 32)
    key.chmod(0o644)
    assert "chmod 600" in invoke("check", str(file)).stderr
    key.chmod(0o600)
    assert invoke("check", str(file), "--set", "storage.type=memory").exit_code == 0


def test_check_rejects_public_events_without_keys_and_reads_key_files(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("events: {endpoint: 'tcp://*:5557'}\n")
    result = invoke("check", str(file))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "  events: endpoint 'tcp://*:5557' can be reached by other users or hosts" in result.stderr
    keys = (f"events.{name}={tmp_path / 'none'}" for name in ("curve_secret_key_file", "curve_client_keys_file"))
    result = invoke("check", str(file), *(word for key in keys for word in ("--set", key)))
    assert result.exit_code == 1 and "events: CURVE secret key file" in result.stderr
    assert invoke("check", str(file), "--set", "events.endpoint=tcp://127.0.0.1:5557").exit_code == 0


def test_check_rejects_a_tier_smaller_than_a_page(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("host: {tokens: 10}\n")
    result = invoke("check", str(tmp_path / "x.yaml"))
    assert result.exit_code == 1 and "host.tokens: is less than one page; got 10, page_size is 64" in result.stderr


@pytest.mark.parametrize("setting", ["page_size", "=5"])
def test_a_setting_without_name_or_value_is_rejected(tmp_path: Path, setting: str) -> None:
    (tmp_path / "x.yaml").touch()
    result = invoke("check", str(tmp_path / "x.yaml"), "--set", setting)
    assert result.exit_code == 1 and "ENTRY=VALUE" in result.stderr


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    result = invoke("check", str(tmp_path / "none.yaml"))
    assert result.exit_code == 1 and "No such file" in result.stderr


def test_schema_lists_every_entry() -> None:
    text = invoke("schema").stdout
    assert all(f"{entry.name}: " in text for entry in all_entries())


def test_schema_as_json_is_a_schema_without_unknown_keywords() -> None:
    schema = json.loads(invoke("schema", "--json").stdout)
    assert schema["properties"]["page_size"]["maximum"] == 1024
    text = json.dumps(schema)
    assert '"gt"' not in text and '"le"' not in text


@pytest.mark.parametrize("name", sorted(ready_files()))
def test_a_ready_configuration_is_written_unchanged_and_loads(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    result = invoke("init", name, "-o", str(file))
    assert (result.exit_code, result.stdout) == (0, "")
    assert file.read_text() == ready_files()[name].read_text() == invoke("init", name).stdout
    assert load_config(file, environ={}).page_size


def test_an_existing_file_is_not_replaced_by_a_ready_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    result = invoke("init", "redis", "-o", str(file))
    assert result.exit_code == 2 and "already exists" in result.stderr and file.read_text() == "mine"


def test_ready_configurations_are_listed_and_a_typo_gets_a_suggestion() -> None:
    listed = invoke("init").stdout
    assert {"file", "redis", "s3", "mooncake", "levels", "sharded"} <= set(listed.split())
    result = invoke("init", "reddis")
    assert (result.exit_code, "did you mean redis?" in result.stderr) == (2, True)


def test_a_configuration_is_checked_from_standard_input_and_shown_as_json() -> None:
    result = CliRunner().invoke(main, ["config", "check", "-", "--json"], input="page_size: 32\n")
    assert (result.exit_code, json.loads(result.stdout)["page_size"]) == (0, 32)
    result = CliRunner().invoke(main, ["config", "check", "-"], input="pagesize: 32\n")
    assert (result.exit_code, "(standard input, line 1)" in result.stderr) == (1, True)


def test_without_an_argument_the_file_in_the_environment_is_checked(tmp_path: Path) -> None:
    assert invoke("check").exit_code == 2
    (tmp_path / "named.yaml").write_text("page_size: 32")
    assert invoke("check", HICACHE_CONFIG_FILE=str(tmp_path / "named.yaml")).stdout.startswith("page_size: 32")

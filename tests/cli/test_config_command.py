"""`hicache config`: what it prints for good and bad configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hicache.cli.main import main
from hicache.config import load_config
from hicache.config.entries import all_entries


def invoke(*args: str, **environ: str) -> Result:
    return CliRunner().invoke(main, ["config", *args], env=environ)


def test_check_prints_ok_and_the_effective_configuration(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text("host: {size: 2048MiB}\n")
    result = invoke("check", str(file), "--set", "page_size=16", HICACHE_TRANSFER__STORAGE_DEADLINE="0.5s")
    head, _, effective = result.stdout.partition("\n")
    assert (result.exit_code, head) == (0, "ok")
    assert "size: 2GiB" in effective and "storage_deadline: 500ms" in effective and "page_size: 16" in effective
    file.write_text(effective)
    assert load_config(file, environ={}, overrides={}).page_size == 16


def test_check_of_a_bad_configuration_lists_what_is_wrong_and_fails(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("page_size: 0\nhots: {}\n")
    result = invoke("check", str(file))
    assert result.exit_code == 1 and not result.stdout
    lines = result.stderr.splitlines()
    assert lines[0] == "hicache: the configuration has 2 problems:" and len(lines) == 3
    assert "did you mean host?" in result.stderr


@pytest.mark.parametrize("setting", ["page_size", "=5"])
def test_a_setting_without_name_or_value_is_refused(tmp_path: Path, setting: str) -> None:
    (tmp_path / "x.yaml").touch()
    result = invoke("check", str(tmp_path / "x.yaml"), "--set", setting)
    assert result.exit_code == 1 and "ENTRY=VALUE" in result.stderr


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
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

"""`hicache demo --storage`: the servers and the configuration of a demo. test_demo.py has a whole one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from hicache.config import load_config
from hicache.errors import ConfigError
from hicache_lab.cli.demo import DEMO_CONFIG, demo_storage
from tests.cli.processes import finish, start
from tests.waiting import wait_for

pytestmark = [pytest.mark.servers, pytest.mark.long]


def test_a_terminated_demo_ends_its_server(
    repository: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(scratch))
    process = start(repository, "demo", "--storage", "valkey")
    wait_for(lambda: any(scratch.glob("hicache-dev-*/socket")) and any(scratch.glob("hicache-demo-*/demo.yaml")))
    process.terminate()
    code, output = finish(process)
    assert code == 130, output
    assert list(scratch.iterdir()) == []


def section(path: Path) -> dict[str, object]:
    loaded = yaml.safe_load(path.read_text())["storage"]
    assert isinstance(loaded, dict)
    return loaded


def test_only_the_storage_of_the_configuration_changes() -> None:
    given = yaml.safe_load(DEMO_CONFIG.read_text())
    with demo_storage("valkey", DEMO_CONFIG) as path:
        made = yaml.safe_load(path.read_text())
        assert made.pop("storage") != given.pop("storage")
        assert made == given
        load_config(path, environ={}, overrides={})
    assert not path.exists()


def test_a_file_store_needs_no_server_and_keeps_its_configured_path() -> None:
    with demo_storage("file", DEMO_CONFIG) as path:
        assert section(path) == yaml.safe_load(DEMO_CONFIG.read_text())["storage"]


def test_two_levels_are_files_over_a_server_whose_credentials_are_set_during_the_demo() -> None:
    with demo_storage("file+s3", DEMO_CONFIG) as path:
        made = section(path)
        assert made["type"] == "levels" and isinstance(made["options"], dict)
        upper, lower = made["options"]["levels"]
        assert (upper["type"], lower["type"]) == ("file", "s3")
        names = [lower["options"][f"{what}_key_env"] for what in ("access", "secret")]
        assert all(os.environ[name] for name in names)
    assert not any(name in os.environ for name in names)


@pytest.mark.parametrize("storage", ["file", "file+s3"])
def test_files_need_a_configuration_with_a_path(tmp_path: Path, storage: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("storage: {type: memory}\n")
    with pytest.raises(ConfigError, match=r"needs a configuration with storage\.type: file"), \
            demo_storage(storage, config):
        pass


@pytest.mark.parametrize("text", ["- a list", "{", "just words"])
def test_an_invalid_configuration_is_rejected(tmp_path: Path, text: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"), demo_storage("valkey", config):
        pass

"""The configuration from an engine's flags, and the identity of its weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache import model_fingerprint
from hicache.config import HiCacheConfig
from hicache.errors import ConfigError, InvalidInput
from hicache.integrations.options import engine_config, hints_of, known_options, model_identity

FLAG = "--options"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HICACHE_CONFIG_FILE", raising=False)


def config_file(folder: Path, text: str) -> dict[str, object]:
    path = folder / "hicache.yaml"
    path.write_text(text)
    return {"config": str(path)}


@pytest.mark.parametrize(("block", "page"), [(1, 64), (16, 64), (48, 96), (64, 64), (128, 128)])
def test_the_default_page_is_whole_blocks(block: int, page: int) -> None:
    assert engine_config(FLAG, None, block).page_size == page
    assert engine_config(FLAG, {}, block, whole_page=True).page_size == block


def test_a_configured_page_must_be_whole_blocks(tmp_path: Path) -> None:
    extra = config_file(tmp_path, "page_size: 96")
    assert engine_config(FLAG, extra, 32).page_size == 96
    assert engine_config(FLAG, extra, 96, whole_page=True).page_size == 96
    with pytest.raises(ConfigError, match=r"page_size: 96 is not a multiple of the engine's block size 64"):
        engine_config(FLAG, extra, 64)
    with pytest.raises(ConfigError, match="96 is configured, but a page of the engine has 32 tokens"):
        engine_config(FLAG, extra, 32, whole_page=True)


def test_environment_variables_set_entries_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = config_file(tmp_path, "host: {size: 1GiB}")
    assert engine_config(FLAG, extra, 16).host.size == 1 << 30
    monkeypatch.setenv("HICACHE_HOST__SIZE", "2GiB")
    assert engine_config(FLAG, extra, 16).host.size == 2 << 30
    monkeypatch.setenv("HICACHE_CONFIG_FILE", str(extra["config"]))
    monkeypatch.delenv("HICACHE_HOST__SIZE")
    assert engine_config(FLAG, None, 16).host.size == 1 << 30
    monkeypatch.delenv("HICACHE_CONFIG_FILE")
    assert engine_config(FLAG, None, 16).host.size == HiCacheConfig().host.size


def test_a_path_that_is_not_a_string_is_rejected_with_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"--options: config: int is not a path; set a file"):
        engine_config(FLAG, {"config": 5}, 16)


def test_an_unknown_option_is_rejected_with_the_list_of_options() -> None:
    known_options(FLAG, {"config": "x"}, frozenset({"config", "model"}))
    known_options(FLAG, None, frozenset())
    with pytest.raises(ConfigError, match="'modle' is not an option of HiCache; use config, model"):
        known_options(FLAG, {"modle": "x"}, frozenset({"config", "model"}))


def identity_in_a_new_process(folder: Path) -> str:
    code = "import sys; from hicache.integrations.options import *; print(model_identity('', {}, sys.argv[1], None))"
    result = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_weights_are_identified_by_a_name_a_folder_or_a_commit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert identity_in_a_new_process(tmp_path) == model_fingerprint(tmp_path)
    assert model_identity(FLAG, {"model": "mine 7"}, str(tmp_path), None) == "mine 7"
    assert model_identity(FLAG, {}, "org/model", "0123abc") == "org/model@0123abc"


def test_a_process_that_started_before_its_weights_were_written_shares_no_pages(tmp_path: Path) -> None:
    """The engine in this process may have loaded other weights before."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    found = [model_identity(FLAG, {}, str(tmp_path), "commit") for _ in range(2)]
    assert len({*found, model_fingerprint(tmp_path)}) == 3


def test_weights_that_cannot_be_identified_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"'org/model' cannot be identified .* set the option 'model'"):
        model_identity(FLAG, {}, "org/model", None)
    with pytest.raises(InvalidInput, match="model"):
        model_identity(FLAG, {"model": 7}, "org/model", None)


@pytest.mark.parametrize(
    ("hints", "params", "expected"),
    [
        (None, None, None),
        (None, {}, None),
        (None, {"do_remote_decode": True}, None),
        (None, {"kv_hints": {"actions": []}}, {"actions": []}),
        (None, {"kv_hint": {"actions": []}}, {"actions": []}),
        (None, {"kv_hints": "first", "kv_hint": "second"}, "first"),
        ("of the request", {"kv_hints": "of the transfer"}, "of the request"),
        (None, {"kv_hints": 7}, 7),  # rejected by the cache
    ],
)
def test_hints_of_a_request_are_its_own_or_those_of_its_transfer(
    hints: object, params: dict[str, object] | None, expected: object
) -> None:
    assert hints_of(SimpleNamespace(kv_hints=hints, kv_transfer_params=params)) == expected

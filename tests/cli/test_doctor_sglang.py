"""`hicache doctor --sglang`: sizes from SGLang's flags, and flags that HiCache's tree refuses or ignores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hicache.cli.main import main
from hicache.integrations.sglang_tree.settings import INEFFECTIVE, REFUSED, flag
from tests.cli.test_doctor import configured, rows

TREE = "--radix-cache-backend hicache --enable-hierarchical-cache"
KIB = 1024


def doctor(folder: Path, flags: str, *arguments: str, **sections: Any) -> Result:
    path = configured(folder, None, **sections)
    return CliRunner().invoke(main, ["doctor", "-c", str(path), "--json", "--sglang", flags, *arguments])


def verdicts(result: Result) -> dict[str, str]:
    """Return the verdicts of SGLang's flags."""
    return {name: row["verdict"] for name, row in rows(result).items() if name.startswith("sglang")}


def test_l1_and_host_memory_of_all_ranks_follow_from_the_flags(tmp_path: Path) -> None:
    flags = f"{TREE} --page-size=64 --tp 2 --max-total-tokens 1000000 --kv-cache-dtype fp8_e5m2 --model-path org/name"
    found = rows(doctor(tmp_path, flags, "--model", "llama-3.1-8b", host={"ratio": 3}))
    assert verdicts(doctor(tmp_path, flags, "--model", "llama-3.1-8b")) == {"sglang": "info"}
    token_bytes = 32 * KIB  # a quarter of bf16 on one rank
    l1 = 1_000_000 * token_bytes
    assert found["sglang"]["figures"] == {
        "page_size": 64, "ranks": 2, "l1_tokens": 1_000_000, "token_bytes": token_bytes, "l1": l1
    }
    assert found["memory"]["figures"]["needed"] == 2 * 3 * l1 and " of 2 ranks" in found["memory"]["finding"]


@pytest.mark.parametrize(
    ("flags", "ranks", "token_bytes"),
    [
        ("", 1, 128 * KIB), ("--tensor-parallel-size 4", 4, 32 * KIB), ("--tp 16", 16, 16 * KIB),
        ("--tp 8 --nnodes 2", 4, 16 * KIB), ("--tp 2 --dp 3", 6, 64 * KIB),
        ("--tp 4 --dp 2 --enable-dp-attention", 4, 64 * KIB), ("--tp 4 --attn-dp-size 4", 4, 128 * KIB),
    ],
)
def test_ranks_share_heads_and_each_has_its_own_host_memory(
    tmp_path: Path, flags: str, ranks: int, token_bytes: int
) -> None:
    figures = rows(doctor(tmp_path, f"{TREE} {flags}", "--model", "llama-3.1-8b"))["sglang"]["figures"]
    assert (figures["ranks"], figures["token_bytes"]) == (ranks, token_bytes)


def test_the_model_is_the_local_folder_of_sglang(tmp_path: Path) -> None:
    entries = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    command = f"python -m sglang.launch_server --model '{tmp_path}' {TREE} --lora-paths one two"
    found = rows(doctor(tmp_path, command))["sglang"]
    assert found["figures"]["token_bytes"] == 2 * 2 * 4 * 8 * 2
    assert "--max-total-tokens" in found["advice"]
    assert "--model" in rows(doctor(tmp_path, f"{TREE} --model-path org/name"))["sglang"]["advice"]


def test_pages_of_another_size_than_the_configuration_fail_and_short_ones_are_a_warning(tmp_path: Path) -> None:
    def found(flags: str, **sections: Any) -> str | None:
        return verdicts(doctor(tmp_path, f"{TREE} {flags}", **sections)).get("sglang --page-size")

    assert found("--page-size 32", page_size=64) == found("", page_size=64) == "fail"
    assert found("--page-size 64", page_size=64) is found("--page-size 32") is None
    assert found("") == "warn"


def test_without_the_flags_of_the_tree_sglang_does_not_use_it(tmp_path: Path) -> None:
    assert verdicts(doctor(tmp_path, "--page-size 64")) == {
        "sglang": "info", "sglang --radix-cache-backend": "warn", "sglang --enable-hierarchical-cache": "fail"
    }
    assert "sglang --enable-hierarchical-cache" not in verdicts(doctor(tmp_path, "--enable-hicache"))


@pytest.mark.parametrize("field", INEFFECTIVE)
def test_a_flag_without_effect_is_a_warning_that_names_the_entry(tmp_path: Path, field: str) -> None:
    found = rows(doctor(tmp_path, f"{TREE} --page-size 64 {flag(field)} 3"))[f"sglang {flag(field)}"]
    assert (found["verdict"], found["advice"]) == ("warn", INEFFECTIVE[field])


VALUES = {
    "hicache_host_memory_mode": ("buffer_only", "cache"), "kv_cache_dtype": ("nvfp4", "fp8_e4m3"),
    "disaggregation_decode_retraction_backup": ("host_pool", "none"), "disable_radix_cache": ("", None),
    "enable_session_radix_cache": ("", None), "enable_kv_cache_sharding": ("", None), "pp_size": ("2", "1"),
    "attn_cp_size": ("2", "1"), "dcp_size": ("2", "1"), "disaggregation_mode": ("decode", "prefill"),
    "enable_pd_role_switch": ("", None), "enable_pdmux": ("", None), "enable_unified_memory": ("", None),
    "kv_canary_sweep_interval": ("100", None),
}


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda each: each.field)
def test_a_refused_flag_fails_with_the_reason_and_only_for_its_values(tmp_path: Path, refusal: Any) -> None:
    name, (bad, good) = flag(refusal.field), VALUES[refusal.field]
    found = rows(doctor(tmp_path, f"{TREE} --page-size 64 {name} {bad}"))[f"sglang {name}"]
    assert (found["verdict"], found["advice"]) == ("fail", refusal.words)
    if good is not None:
        assert f"sglang {name}" not in verdicts(doctor(tmp_path, f"{TREE} --page-size 64 {name} {good}"))


@pytest.mark.parametrize("flags", ["--page-size 0", "--tp -1", "--tp", "--max-total-tokens 1e6", "--model 'a"])
def test_flags_that_cannot_be_read_are_an_error_of_usage(tmp_path: Path, flags: str) -> None:
    found = doctor(tmp_path, flags)
    assert found.exit_code == 2 and "--sglang" in found.stderr

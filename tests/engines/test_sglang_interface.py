"""The parts of SGLang that HiCacheStore uses, compared with the installed wheel: a rename upstream fails a test.

The tests use SGLang's classes and host pools. No engine starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.cli import doctor_sglang
from hicache.integrations.sglang.hits import ALL_PAGES, TRAILING_PAGES
from hicache.integrations.sglang.identity import KV, MAMBA
from hicache.integrations.sglang.pages import LAYOUTS
from hicache.integrations.sglang_tree.settings import INEFFECTIVE, REFUSED

from .process import EngineProcess
from .sglang_engine import sglang_environ

# The methods of SGLang's interface. A new one may be a useful hook, for example for new weights.
METHODS = {
    "batch_exists", "batch_exists_v2", "batch_get", "batch_get_v1", "batch_get_v2", "batch_set", "batch_set_v1",
    "batch_set_v2", "clear", "exists", "get", "get_stats", "on_host_pools_registered", "register_mem_host_pool_v2",
    "register_mem_pool_host", "set",
}
FIELDS = {
    "config": {
        "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size",
        "is_mla_model", "should_split_heads", "extra_config",
    },
    "extra": {"prefix_keys"},
    "transfer": {"name", "host_indices", "keys", "hit_policy"},
    "result": {"kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"},
    "policies": {ALL_PAGES, TRAILING_PAGES, "block_groups"},  # SGLang makes no transfer with the last one
    "pools": {KV, MAMBA},
    "metrics": {"prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth"},
}
FLAGS = {
    "model": {
        "model_path", "revision", "kv_cache_dtype", "quantization", "quantization_param_path",
        "json_model_override_args", "dtype", "weight_cache_mode",
    },
    "lora": {"lora_paths"},
    "spec": {"speculative_draft_model_path"},
    "serving": {"weight_version"},
    # HiCache's tree does not read weights with these.
    "exec.features": {"enable_memory_saver"},
    "exec.offload": {"cpu_offload_gb", "offload_group_size", "ple_offload_embedding"},
}


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("sglang-facts")
    with EngineProcess("tests.engines.sglang_facts", {}, folder=folder, environ=sglang_environ()) as process:
        yield process


def test_the_interface_has_the_known_methods(sglang: EngineProcess) -> None:
    assert set(sglang.call("methods")) == METHODS
    assert set(sglang.call("own")) == METHODS - {"on_host_pools_registered"}


def test_each_method_has_the_parameters_of_sglang(sglang: EngineProcess) -> None:
    for name, (theirs, ours) in sglang.call("methods").items():
        assert ours == theirs, name


def test_sglang_has_the_fields_that_hicache_reads(sglang: EngineProcess) -> None:
    found = sglang.call("names")
    for kind, wanted in FIELDS.items():
        assert wanted <= set(found[kind]), kind
    assert set(found["policies"]) == FIELDS["policies"]


def test_sglang_has_the_flags_that_identify_pages(sglang: EngineProcess) -> None:
    found = sglang.call("flags")
    for namespace, wanted in FLAGS.items():
        assert wanted <= set(found[namespace]), namespace


def test_sglang_has_the_flags_that_the_tree_refuses_or_ignores_and_the_doctor_reads(sglang: EngineProcess) -> None:
    wanted = {*INEFFECTIVE, *(refusal.field for refusal in REFUSED), *doctor_sglang.NUMBERS, "kv_cache_dtype"}
    assert wanted <= set(sglang.call("fields"))


def test_only_flags_that_a_user_gave_count_as_given(sglang: EngineProcess) -> None:
    chosen = {"hicache_size": 3, "dcp_size": 2}
    assert sglang.call("given", **chosen, page_size=64, enable_hierarchical_cache=True) == chosen


@pytest.mark.parametrize(
    ("layout", "is_mla"), [(layout, False) for layout in LAYOUTS] + [(layout, True) for layout in LAYOUTS[:3]]
)
def test_addresses_of_pages_agree_with_sglangs_host_pools(sglang: EngineProcess, layout: str, is_mla: bool) -> None:
    assert all(sglang.call("moved", layout=layout, is_mla=is_mla))


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_addresses_of_packed_pages_agree_with_sglangs_host_pools(sglang: EngineProcess, layout: str) -> None:
    assert all(sglang.call("moved", layout=layout, is_mla=True, is_packed=True))


@pytest.mark.parametrize(
    ("layout", "is_mla", "is_packed"),
    [(layout, False, False) for layout in LAYOUTS] + [(layout, True, False) for layout in LAYOUTS[:3]]
    + [(layout, True, True) for layout in LAYOUTS[:2]],  # a packed pool in layer_first has a buffer per layer
)
def test_sglangs_controller_gets_the_same_pages_with_and_without_copies(
    sglang: EngineProcess, tmp_path: Path, layout: str, is_mla: bool, is_packed: bool
) -> None:
    found = sglang.call("copied", folder=str(tmp_path), layout=layout, is_mla=is_mla, is_packed=is_packed)
    assert found == {"stored": True, "in place": [True] * 3, "copied": [2, True, True], "copied, of v1": [1, True]}


def test_a_pool_whose_pages_have_no_order_in_memory_needs_transfers_in_place(
    sglang: EngineProcess, tmp_path: Path
) -> None:
    found = sglang.call("copied", folder=str(tmp_path), layout="layer_first", is_mla=True, is_packed=True)
    assert '"interface_v1": 1' in found["error"]


def test_a_flush_replaces_the_table_of_a_host_pool(sglang: EngineProcess) -> None:
    """HiCacheStore detects by it that the weights may have changed."""
    assert sglang.call("new_table") == [True, True]


def test_an_unsupported_engine_is_rejected_with_the_flag(sglang: EngineProcess) -> None:
    v1 = {"interface_v1": 1}
    assert sglang.call("create", extra=v1) == ""
    assert sglang.call("create", extra={}) == ""
    assert "'confg' is not an option" in sglang.call("create", extra={**v1, "confg": "x"})
    assert "tp_lcm_size" in sglang.call("create", extra=v1, split_heads=True)

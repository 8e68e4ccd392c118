"""SGLang's own tests of a tree, from `sglang.test.kits` of its wheel, on HiCache's tree."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.seeds import seeds

from .model import save_model, save_tokenizer
from .process import EngineProcess
from .sglang_engine import PAGE_TOKENS, sglang_environ, sglang_options

_SPEC = importlib.util.find_spec("sglang")
assert _SPEC is not None and _SPEC.submodule_search_locations is not None
KITS = Path(_SPEC.submodule_search_locations[0]) / "test" / "kits"

# The tests of mixins that run here, and the functions that tests of SGLang call.
CASES = {
    "abort_timeout_kit.AbortAllMixin": "test_abort_all",
    "kl_divergence_kit.KLDivergenceMixin": "test_input_output_logprobs_match_decode_cache_hit "
    "test_input_output_logprobs_match_prefill_cache_hit",
    "unified_radix_cache_kit.AccuracyTwoPassMixin": "test_l3_prefetch_full_prefix_hit_after_flush",
    "unified_radix_cache_kit.UnifiedRadixTreeTestMixin": "test_multiturn_decode_cache_hit_branching "
    "test_multiturn_logprobs_match test_multiturn_prefill_cache_hit_branching",
}
FUNCTIONS = {
    "cache_hit_kit.run_multiturn_cache_hit_test", "radix_cache_server_kit.run_radix_attention_test",
    "unified_radix_cache.insert_walk.SegmentLockFuzzFixtures",
}
# Why the others do not run: a name is a module, a class, or a test.
NOT_APPLICABLE = {
    "Its subject is the API, the sampler, the grammar or the model, not the tree.": """
        anthropic_messages_kit basic_api_contract_kit basic_decode_correctness_kit
        attention_unittest ebnf_constrained_kit fwd_occupancy_kit json_constrained_kit json_mode_kit matched_stop_kit
        reasoning_kit regex_constrained_kit""",
    "It scores the answers of a trained model.": """
        basic_scheduler_stress_kit eval_accuracy_kit lm_eval_kit mmmu_vlm_kit
        unified_radix_cache_kit.AccuracyTwoPassMixin.test_gsm8k_two_passes
        unified_radix_cache_kit.UnifiedRadixTreeTestMixin.test_gsm8k""",
    "It needs a draft model. SpecFeatureKit.test_radix_attention is run_radix_attention_test.": """
        spec_decoding_kit spec_server_kits""",
    "A timeout or a pause of the scheduler reaches the tree as an abort or not at all.": """
        abort_timeout_kit.RunningTimeoutTwoWaveMixin abort_timeout_kit.WaitingTimeoutMixin pause_generation_kit""",
    "It needs separate servers for prefill and decode.": "pd_parity_kit",
    "SGLang refuses streaming sessions with a tree that is not its own.": """
        streaming_session_kit unified_radix_cache.insert_walk.StreamingSessionLockLifecycleFixtures""",
    "It needs states: its second request has no hit, because no state was kept at the branch.": """
        prefix_cache_branching_kit""",
    "It needs several pools.": """
        unified_radix_cache.core.MambaCheckpointGridFixtures
        unified_radix_cache.core.MambaFinishedOvershootCheckpointFixtures
        unified_radix_cache.core.SWADraftHistoryFixtures
        unified_radix_cache.core.SWAWindowUnderBigramKeyFixtures
        unified_radix_cache.core.UnifiedMambaLRUMatchRefreshFixtures
        unified_radix_cache.core.UnifiedRadixCacheDecoderSwaBoundedReplayHoldBackFixtures
        unified_radix_cache.core.UnifiedRadixCacheInt8MambaCheckpointFixtures
        unified_radix_cache.hicache unified_radix_cache.insert_walk.ResumableInsertWalkSWAFixtures
        unified_radix_cache.insert_walk.SegmentLockProtocolFixtures""",
    "Fixtures without a test, over nodes, components and the controller of SGLang's own tree.": """
        unified_radix_cache.config unified_radix_cache.core.DisabledUnifiedRadixCacheFixtures
        unified_radix_cache.core.FakeFullComponent unified_radix_cache.core.PagedFullComponent
        unified_radix_cache.core.UnifiedLRUListBoundedRefreshFixtures
        unified_radix_cache.core.UnifiedRadixAllocationEvictionRealComponentsFixtures
        unified_radix_cache.core.UnifiedRadixCacheCoreFixtures unified_radix_cache.kv_events
        unified_radix_cache.load_back unified_radix_cache.mixins unified_radix_cache.rust_unified_tree_core_inspector
        unified_radix_cache.storage unified_radix_cache.unified_tree_core_inspection_interface
        unified_radix_cache.unified_tree_core_inspector""",
}
TREE_TOKENS = 256
CONFIG = {
    "host": {"tokens": 16384},
    "break_even": {"mode": "always"},
    "prefetch": {"threshold_tokens": PAGE_TOKENS, "policy": "wait_complete"},
}


def kit_tests() -> Iterator[str]:
    """Yield the tests of mixins, the functions that run a test, and the classes of fixtures, by module."""
    for path in sorted(KITS.rglob("*.py")):
        module = ".".join(path.relative_to(KITS).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and module.startswith("unified_radix_cache."):
                yield f"{module}.{node.name}"
            elif isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and each.name.startswith("test"):
                        yield f"{module}.{node.name}.{each.name}"
            elif isinstance(node, ast.FunctionDef) and node.name.startswith(("run_", "test_")):
                yield f"{module}.{node.name}"


def test_each_test_of_the_kits_runs_or_has_a_reason() -> None:
    run = {f"{kit}.{test}" for kit, tests in CASES.items() for test in tests.split()} | FUNCTIONS
    entries = [*run, *(name for names in NOT_APPLICABLE.values() for name in names.split())]
    found = list(kit_tests())
    matches = {test: [entry for entry in entries if f"{test}.".startswith(f"{entry}.")] for test in found}
    assert {test: names for test, names in matches.items() if len(names) != 1} == {}
    assert set(entries) - {name for names in matches.values() for name in names} == set(), "not in the kits"


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("sglang-kits")
    model = save_model(folder / "model", "words")
    save_tokenizer(model)
    config = folder / "hicache.yaml"
    config.write_text(json.dumps(CONFIG | {"storage": {"type": "file", "options": {"path": str(folder / "pages")}}}))
    engine = sglang_options(
        model, radix_cache_backend="hicache", skip_tokenizer_init=False, context_length=4096, max_running_requests=8
    )
    options = {"engine": engine, "folder": str(folder)}
    environ = sglang_environ(HICACHE_CONFIG_FILE=str(config))
    with EngineProcess("tests.engines.sglang_kits", options, folder=folder, environ=environ) as process:
        yield process


@pytest.mark.parametrize(("kit", "test"), [(kit, test) for kit, tests in CASES.items() for test in tests.split()])
def test_a_test_of_a_kit_passes(kits: EngineProcess, kit: str, test: str) -> None:
    kits.call("case", kit=kit, test=test)


def test_a_random_tree_of_requests_is_served(kits: EngineProcess) -> None:
    kits.call("tree")


def test_each_round_of_a_conversation_hits_the_rounds_before(kits: EngineProcess) -> None:
    assert kits.call("rounds") > 0.4


@pytest.fixture(scope="module")
def tree(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("sglang-kit-tree")
    config = folder / "hicache.yaml"
    config.write_text(json.dumps(CONFIG))
    options = sglang_options(llama, radix_cache_backend="hicache", page_size=1, max_total_tokens=TREE_TOKENS)
    environ = sglang_environ(HICACHE_CONFIG_FILE=str(config))
    with EngineProcess("tests.engines.sglang_kit_tree", options, folder=folder, environ=environ) as process:
        yield process


@pytest.mark.parametrize("seed", seeds(5))
def test_random_inserts_locks_and_evictions(tree: EngineProcess, seed: int) -> None:
    found = tree.call("run_seed", seed=seed)
    assert found["locks"] > 5
    assert found["protected"] == 0
    assert found["free"] + found["evictable"] == TREE_TOKENS

"""The parts of SGLang that HiCache's tree uses and implements, compared with the source of the installed wheel: a
change upstream fails one named test. Nothing of SGLang is imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.integrations.sglang_tree.settings import INEFFECTIVE, REFUSED

from .process import ROOT

_SPEC = importlib.util.find_spec("sglang")
assert _SPEC is not None and _SPEC.submodule_search_locations is not None
SGLANG = Path(_SPEC.submodule_search_locations[0])
SRT = SGLANG / "srt"
INTEGRATIONS = ROOT / "hicache" / "integrations"
OURS = [*sorted((INTEGRATIONS / "sglang_tree").glob("*.py")), INTEGRATIONS / "sglang" / "running.py"]

# Methods of BasePrefixCache that fit as they are. A new one may have to be implemented.
INHERITED = {
    "available_and_evictable_str", "claim_kv_row", "discard_storage_prefetch_accounting", "evict_for_alloc",
    "evict_sliding_windows", "finish", "free_kv_row", "init_metrics_collector", "load_back_is_cache_owned",
    "maybe_hand_to_session", "prefix_device_indices", "release_radix_session", "release_session",
    "resolve_node_handle", "rotation_base_of", "session_records", "supports_auxiliary_swa",
    "supports_fast_match_prefix", "supports_mamba", "supports_prefix_sharing", "supports_swa", "swa_evictable_size",
    "swa_protected_size", "swa_reprefill_tail_tokens", "swa_retain_floor", "swa_retain_window", "swa_transient_size",
    "update_eviction_metrics", "waiting_storage_span",
}
# Names that SGLang reads from a tree and that this tree lacks, by the reason why SGLang does not come to read them.
NOT_APPLICABLE = {
    "Only SGLang's own tree has components, sidecar pools and a linker; SGLang asks for its class first.": """
        components dec_host_lock_ref evict_host finish_external_linker_loads host_pool_group inc_host_lock_ref linker
        register_sidecar_pool sidecar_pool_specs tree_core validate_retraction_host_capacity""",
    "Models with windows or state are refused.": """
        all_mamba_values_flatten all_values_flatten mamba_evictable_size mamba_protected_size release_swa
        release_swa_prefix_lock sliding_window_size""",
    "Separate servers for prefill and decode do not use it.": """
        advance_unpublished_req has_free_load_back_slot has_ongoing_prefetch is_load_back_event_done
        query_storage_hit_length""",
    "Pipeline parallelism is refused.": "bind_prefetch_ticket",
    "SGLang refuses radix-native sessions with another tree.": "ensure_session_generation open_radix_session",
    "--enable-lmcache has a tree of its own.": "has_pending_cache_operations",
    "The keys before a page are not asked for: hicache_storage_pass_prefix_keys is False.": "get_prefix_hash_values",
    "SGLang's metrics read the host pool as token_to_kv_pool_host.": "full_kv_pool_host",
}
# The expressions in HiCache's source that are objects of SGLang, and their classes. HiCache uses no other attributes.
PREFIX_CACHE = "mem_cache/base_prefix_cache.py"
OBJECTS = {
    "req request matched.request": ["managers/schedule_batch.py:Req"],
    "req.kv": ["managers/schedule_batch.py:ReqKvInfo"],
    "req.lock lock": [f"{PREFIX_CACHE}:TreeLock"],
    "params": [
        f"{PREFIX_CACHE}:EvictParams", f"{PREFIX_CACHE}:InitLoadBackParams", f"{PREFIX_CACHE}:MatchPrefixParams",
        "mem_cache/cache_init_params.py:CacheInitParams",
    ],
    "params.key": ["mem_cache/radix_cache.py:RadixKey"],
    "context": ["mem_cache/registry.py:TreeCacheBuildContext"],
    "context.model_config": ["configs/model_config.py:ModelConfig"],
    "context.tp_worker worker": ["managers/tp_worker.py:TpModelWorker"],
    "context.tp_worker.model_runner runner": ["model_executor/model_runner.py:ModelRunner"],
    "scheduler": ["managers/scheduler.py:Scheduler"],
    "batch": ["managers/schedule_batch.py:ScheduleBatch"],
    "allocator self._allocator self.token_to_kv_pool_allocator": [
        "mem_cache/allocator/base.py:BaseTokenToKVPoolAllocator",
    ],
    "self.req_to_token_pool": ["mem_cache/memory_pool.py:ReqToTokenPool"],
    "pool draft": ["mem_cache/memory_pool.py:KVCache"],
    "infos[0]": ["mem_cache/device_pool_info.py:DevicePoolInfo"],
    "info": ["mem_cache/device_pool_info.py:MHABufferInfo", "mem_cache/device_pool_info.py:MLABufferInfo"],
    "info.buffers": ["mem_cache/device_pool_info.py:KVBuffers"],
    "self._queue": ["mem_cache/events.py:KVCacheEventRecorder"],
    "self._lora_names names": ["mem_cache/events.py:KvEventLoraNames"],
    "memory get_memory()": ["arg_groups/fields/memory.py:Memory"],
    "get_model()": ["arg_groups/fields/model.py:Model"],
    "offload": ["arg_groups/fields/exec_.py:ExecOffload"],
    "features": ["arg_groups/fields/exec_.py:ExecFeatures"],
    "parallel get_parallel()": ["arg_groups/fields/parallel.py:Parallel", "runtime_context.py:ParallelContext"],
    "get_serving()": ["arg_groups/fields/serving.py:Serving"],
    "get_lora()": ["arg_groups/fields/lora.py:Lora"],
    "get_spec()": ["arg_groups/fields/spec.py:Spec"],
}


@functools.cache
def classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def methods(kind: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Return the methods and the getters of properties."""
    return {node.name: node for node in reversed(kind.body) if isinstance(node, ast.FunctionDef)}


def attributes(kind: ast.ClassDef) -> set[str]:
    """Return the names of an instance: those of the class, and those that its methods set."""
    names = set(methods(kind))
    for node in ast.walk(kind):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                names |= {ast.unparse(target).removeprefix("self.")} if is_own or node in kind.body else set()
    return names


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the parameters, optional ones with `=`, those by name only after `*`."""
    given = function.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    found = [each.arg + "=" * (default is not None) for each, default in zip(given.args, defaults, strict=True)]
    by_name = [f"*{each.arg}" for each in given.kwonlyargs]
    return found + [name + "=" * (d is not None) for name, d in zip(by_name, given.kw_defaults, strict=True)]


BASE = classes(SRT / "mem_cache" / "base_prefix_cache.py")["BasePrefixCache"]
THEIRS = classes(SRT / "mem_cache" / "unified_radix_cache.py")["UnifiedRadixCache"]
TREE = next(found["HiCacheTree"] for path in OURS if "HiCacheTree" in (found := classes(path)))


def is_tree(node: ast.expr, names: set[str]) -> bool:
    named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return named == "tree_cache" or (named in names and isinstance(node, ast.Name))


def is_lookup(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}


def read_of_a_tree(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names that a function reads of `tree_cache`, of a variable for it, or of a parameter with its type."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.annotation is not None and "PrefixCache" in ast.unparse(node.annotation):
            names.add(node.arg)
        elif isinstance(node, ast.Assign) and is_tree(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and is_tree(node.value, names):
            yield node.attr
        elif isinstance(node, ast.Call) and is_lookup(node) and is_tree(node.args[0], names):
            yield ast.literal_eval(node.args[1])


@functools.cache
def read_of_trees() -> dict[str, str]:
    """Return the names that SGLang reads of a tree, with a function that does."""
    found: dict[str, str] = {}
    for path in SRT.rglob("*.py"):
        source = path.read_text()
        if "tree_cache" in source or "BasePrefixCache" in source:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef):
                    place = f"{path.relative_to(SRT)}: {node.name}"
                    found |= {name: place for name in read_of_a_tree(node) if not name.startswith("_")}
    return found


@functools.cache
def our_nodes() -> list[ast.AST]:
    return [node for path in OURS for node in ast.walk(ast.parse(path.read_text()))]


def imports() -> list[tuple[str, str]]:
    """Return the modules and names of SGLang that HiCache's tree imports."""
    found = [node for node in our_nodes() if isinstance(node, ast.ImportFrom) and node.level == 0]
    names = {(str(node.module), alias.name) for node in found for alias in node.names}
    return sorted(each for each in names if each[0].startswith("sglang."))


def used_of(expressions: set[str]) -> set[str]:
    """Return the attributes that HiCache's source uses of these expressions."""
    found = [node for node in our_nodes() if isinstance(node, ast.Attribute)]
    return {node.attr for node in found if ast.unparse(node.value) in expressions}


def test_the_tree_implements_all_that_sglang_reads_of_a_tree() -> None:
    not_applicable = {name for names in NOT_APPLICABLE.values() for name in names.split()}
    lacking = read_of_trees().keys() - attributes(TREE) - attributes(BASE)
    assert {name: read_of_trees()[name] for name in lacking - not_applicable} == {}, "new in SGLang"
    assert not_applicable - lacking == set(), "implemented, or not read by SGLang"


def test_reads_through_a_variable_and_by_name_are_found() -> None:
    assert {"ongoing_write_through", "token_to_kv_pool_host"} <= read_of_trees().keys()


def test_each_method_of_sglangs_interface_is_implemented_or_fits() -> None:
    assert methods(BASE).keys() - methods(TREE).keys() - attributes(TREE) == INHERITED


SHARED = methods(TREE).keys() & (methods(BASE).keys() | methods(THEIRS).keys() - {"__init__"})


@pytest.mark.parametrize("name", sorted(SHARED))
def test_a_method_has_the_parameters_of_sglang(name: str) -> None:
    """Those of its own tree that are not in its interface have ids of nodes in place of nodes."""
    ours, theirs = methods(TREE)[name], methods(BASE).get(name) or methods(THEIRS)[name]
    if theirs.args.kwarg or not ours.args.kwarg:
        assert parameters(ours) == [each.replace("node_id", "node") for each in parameters(theirs)]


@pytest.mark.parametrize(("module", "name"), imports())
def test_an_imported_name_exists(module: str, name: str) -> None:
    path = SGLANG.parent.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    defined = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            defined.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert name in defined or (path / f"{name}.py").exists()


@pytest.mark.parametrize("expressions", OBJECTS)
def test_the_attributes_that_hicache_uses_of_an_object_exist(expressions: str) -> None:
    used = used_of(set(expressions.split()))
    assert used
    kinds = [each.partition(":") for each in OBJECTS[expressions]]
    assert used - {name for path, _, kind in kinds for name in attributes(classes(SRT / path)[kind])} == set()


def test_a_request_has_the_fields_of_a_prefill() -> None:
    prefilled = attributes(classes(INTEGRATIONS / "sglang_tree" / "prefill.py")["Prefilled"])
    assert prefilled and prefilled <= attributes(classes(SRT / "managers" / "schedule_batch.py")["Req"])


def test_refused_and_ineffective_flags_exist() -> None:
    flags = {*INEFFECTIVE, *(refusal.field for refusal in REFUSED)}
    groups = [kind for path in (SRT / "arg_groups" / "fields").glob("*.py") for kind in classes(path).values()]
    assert flags - {name for group in groups for name in attributes(group)} == set()


def test_a_missing_attribute_is_detected() -> None:
    assert "cache_protected_length" not in attributes(classes(SRT / "managers" / "schedule_batch.py")["ReqKvInfo"])

"""The methods and attributes of vLLM that HiCacheConnector uses, compared with the installed wheel: a change upstream
fails one named test. The imports check the imported names.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch

with warnings.catch_warnings():  # from vLLM and its imports
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorTransferResults,
        supports_hma,
    )
    from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    from hicache.integrations.vllm import HiCacheConnector
    from hicache.integrations.vllm.connector import PageConnector

# The public methods of a connector with their parameters. HiCache may have to implement a new one.
METHODS = {
    "bind_connector_metadata": "connector_metadata",
    "bind_gpu_block_pool": "gpu_block_pool",
    "bind_kv_cache_manager": "kv_cache_manager",
    "build_connector_meta": "scheduler_output",
    "build_connector_worker_meta": "",
    "build_kv_connector_stats": "data",
    "build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
    "clear_connector_metadata": "",
    "finish_forward": "",
    "get_block_ids_with_load_errors": "",
    "get_external_cache_hit_sources": "request num_external_tokens",
    "get_finished": "finished_req_ids",
    "get_finished_count": "",
    "get_handshake_metadata": "",
    "get_kv_connector_kv_cache_events": "",
    "get_kv_connector_stats": "",
    "get_loaded_kv_cache_group_ids": "request",
    "get_mem_pool_context": "",
    "get_num_new_matched_tokens": "request num_computed_tokens",
    "get_required_kvcache_layout": "vllm_config",
    "get_transfer_results": "finished_req_ids",
    "handle_preemptions": "kv_connector_metadata",
    "has_connector_metadata": "",
    "has_pending_block_frees": "",
    "has_pending_push_work": "",
    "on_new_request": "request",
    "register_finished_partial_tail": "request block_ids partial_tail_offloads",
    "register_kv_caches": "kv_caches",
    "request_finished": "request block_ids",
    "requires_kv_delivery": None,
    "requires_piecewise_for_cudagraph": "extra_config",
    "reset_cache": "",
    "reset_capture_state": "",
    "role": None,
    "save_kv_layer": "layer_name kv_layer attn_metadata kwargs",
    "set_host_xfer_buffer_ops": "copy_operation",
    "set_xfer_handshake_metadata": "metadata",
    "set_xfer_handshake_metadata_pp_aware": "metadata",
    "shutdown": "",
    "start_load_kv": "forward_context kwargs",
    "supports_divergent_local_hybrid_hits": None,
    "take_events": "",
    "update_connector_output": "connector_output",
    "update_state_after_alloc": "request blocks num_external_tokens",
    "wait_for_layer_load": "layer_name",
    "wait_for_save": "",
}
# The attributes of vLLM's objects that HiCache reads.
READ = {
    "vllm.config:KVEventsConfig": "enable_kv_cache_events",
    "vllm.config:KVTransferConfig": "engine_id kv_connector_extra_config",
    "vllm.config:ModelConfig": "model hf_config dtype quantization quantization_config max_model_len "
    "multimodal_config is_diffusion "
    "is_prefix_caching_supported",
    "vllm.config:ParallelConfig": "tensor_parallel_size pipeline_parallel_size nnodes prefill_context_parallel_size "
    "decode_context_parallel_size data_parallel_index data_parallel_size",
    "vllm.config:SpeculativeConfig": "uses_draft_kv_cache",
    "vllm.config:CacheConfig": "cache_dtype enable_prefix_caching prefix_caching_hash_algo",
    "vllm.config:LoadConfig": "load_format",
    "vllm.config:MultiModalConfig": "mm_processor_cache_gb",
    "vllm.config:VllmConfig": "model_config parallel_config cache_config load_config speculative_config "
    "kv_transfer_config kv_events_config",
    "vllm.distributed.kv_events:BlockRemoved": "block_hashes medium group_idx",
    "vllm.distributed.kv_events:BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium "
    "lora_name extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window",
    "vllm.lora.request:LoRARequest": "lora_name lora_path name adapter_id",
    "vllm.v1.core.block_pool:BlockPool": "get_cached_block",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "get_block_ids",
    "vllm.v1.core.sched.output:CachedRequestData": "resumed_req_ids",
    "vllm.v1.core.sched.output:KVConnectorBlockState": "get_block_ids",
    "vllm.v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens preempted_req_ids scheduled_cached_reqs "
    "kv_connector_block_state",
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "block_size unpadded_page_size_bytes sliding_window",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "num_blocks kv_cache_groups kv_tp_replicas",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "layer_names kv_cache_spec",
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": "kv_cache_specs",
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": "HOST DISK",
    "vllm.v1.outputs:KVConnectorOutput": "kv_connector_worker_meta",
    "vllm.v1.request:Request": "request_id num_computed_tokens block_hashes skip_reading_prefix_cache num_tokens "
    "trace_headers lora_request all_token_ids mm_features cache_salt prompt_embeds kv_hints kv_transfer_params",
    "vllm.v1.kv_hints:KvHintAction": "action_id action_type action_version payload",
    "vllm.v1.kv_hints:KvHintsEnvelope": "protocol_version message_id actions",
    "vllm.v1.kv_offload.base:ReqContext": "req_id kv_hints kv_transfer_params",
}


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def has(owner: type, name: str) -> bool:
    """True if instances have the attribute: defined in the class, annotated, or set by its methods."""
    return any(name in vars(kind) or name in vars(kind).get("__annotations__", {}) for kind in owner.__mro__) or (
        f"self.{name} = " in inspect.getsource(owner) or f"self.{name}: " in inspect.getsource(owner)
    )


@pytest.mark.parametrize("name", sorted({*METHODS, *(name for name in dir(KVConnectorBase_V1) if name[0] != "_")}))
def test_a_connector_has_the_known_methods(name: str) -> None:
    assert name in METHODS, "new in vLLM"
    wanted, found = METHODS[name], getattr(KVConnectorBase_V1, name)
    assert isinstance(found, property) if wanted is None else parameters(found) == wanted.split()


@pytest.mark.parametrize("kind", [HiCacheConnector, PageConnector])
def test_the_methods_of_hicache_have_the_parameters_of_vllm(kind: type) -> None:
    names = METHODS.keys() & vars(kind).keys()
    assert names
    for name in names:
        ours, theirs = vars(kind)[name], vars(KVConnectorBase_V1)[name]
        assert type(ours) is type(theirs), name
        if not isinstance(ours, property) and parameters(getattr(kind, name)) != ["args"]:
            assert parameters(getattr(kind, name)) == parameters(getattr(KVConnectorBase_V1, name)), name


@pytest.mark.parametrize("owner", READ)
def test_attributes_that_hicache_reads_exist(owner: str) -> None:
    module, _, name = owner.partition(":")
    kind = getattr(importlib.import_module(module), name)
    assert [name for name in READ[owner].split() if not has(kind, name)] == []


def test_a_missing_attribute_is_detected() -> None:
    assert not has(KVConnectorTransferResults, "request_id")


def test_transfer_results_have_the_field_order_that_hicache_uses() -> None:
    assert [field.name for field in fields(KVConnectorTransferResults)] == [
        "finished_sending", "finished_recving", "failed_recving",
    ]


def test_vllm_keeps_its_hybrid_allocator_with_this_connector() -> None:
    """Without it, vLLM changes windows to full attention, and does not start models with states."""
    assert supports_hma(HiCacheConnector)
    attention: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = FullAttentionSpec(**attention)
    layers: dict[str, Any] = {"0": full, "1": SlidingWindowSpec(**attention, sliding_window=128)}
    unify_hybrid_kv_cache_specs(layers)
    assert type(layers["1"]) is FullAttentionSpec and layers["1"].sliding_window == 128
    state = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match="Failed to promote local KV cache specs to one unified type"):
        unify_hybrid_kv_cache_specs({"0": full, "1": state})

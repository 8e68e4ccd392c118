"""HiCacheConnector and vLLM's configuration: namespaces, and unsupported configurations. No engine starts."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache.config import HiCacheConfig
from hicache.errors import ConfigError, SharedMemoryError

with warnings.catch_warnings():  # from vLLM and its imports
    warnings.simplefilter("ignore")
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from hicache.integrations.vllm import engine as vllm_engine
    from hicache.integrations.vllm.engine import AdapterKeys, VllmEngine, log_as_vllm
from hicache.integrations.vllm.layout import BlockLayout
from hicache.keys import Namespace
from tests.waiting import WAIT_S, wait_for

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.uint8)


def vllm_config(**changes: Any) -> Any:
    """Return the parts of a VllmConfig that HiCache reads. `changes` are entries of its sections."""
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "someone/model", "hf_config": SimpleNamespace(_commit_hash="c0ffee", to_dict=dict),
            "dtype": torch.bfloat16, "quantization": None, "quantization_config": None, "is_diffusion": False,
            "is_prefix_caching_supported": True, "max_model_len": 4096, "multimodal_config": None,
        },
        "load_config": {"load_format": "auto"},
        "parallel_config": {
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "nnodes": 1, "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1, "data_parallel_index": 0, "data_parallel_size": 1,
        },
        "cache_config": {
            "prefix_caching_hash_algo": "sha256", "cache_dtype": "fp8_e4m3", "enable_prefix_caching": True,
        },
        "kv_transfer_config": {
            "kv_connector_extra_config": {}, "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "engine_id": "an-engine",
        },
    }
    for entries in sections.values():
        entries.update({name: value for name, value in changes.items() if name in entries})
    speculative = changes.get("speculative_config")
    return SimpleNamespace(
        speculative_config=speculative,
        lora_config=changes.get("lora_config"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        **{name: SimpleNamespace(**entries) for name, entries in sections.items()},
    )


def namespace_of(**changes: Any) -> Namespace:
    """Return an engine's namespace."""
    layout = BlockLayout(16, 64, (128,), 1)
    engine = VllmEngine(HiCacheConfig(page_size=64), layout, ("layer",), 8, False, "specs", vllm_config(**changes))
    return engine.namespace("the form of its blocks")


def digest_of(**changes: Any) -> bytes:
    """Return the digest of an engine's namespace."""
    return namespace_of(**changes).digest


def test_the_label_is_the_name_of_the_model_without_its_folder() -> None:
    assert namespace_of().label == "model"
    assert namespace_of(model="/srv/" + "deep/" * 100 + "llama/").label == "llama"


def test_engines_with_equal_configurations_share_pages() -> None:
    assert digest_of() == digest_of()


@pytest.mark.parametrize(
    "change",
    [
        {"cache_dtype": "fp8_e5m2"},  # both kinds of fp8 are bytes of equal length in torch
        {"quantization": "fp8"},
        {"quantization_config": {"linear_scheme": "fp8"}},
        {"dtype": torch.float16},
        {"max_model_len": 131072},  # LongRoPE selects its factors by it
        {"load_format": "dummy"},
    ],
    ids=str,
)
def test_engines_whose_kv_can_differ_do_not_share_pages(change: dict[str, Any]) -> None:
    assert digest_of() != digest_of(**change)


def adapter_in(folder: Path, weights: bytes) -> LoRARequest:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return LoRARequest("an adapter", 1, str(folder))


def key_of(keys: AdapterKeys, adapter: LoRARequest) -> str:
    future = keys.of(adapter)
    assert future is not None
    return future.result(WAIT_S)


def replaced(keys: AdapterKeys, adapter: LoRARequest, weights: bytes) -> None:
    """Replace the weights, until the file system's clock shows that this was after `keys` was made: it has ticks."""
    path = Path(adapter.path, "adapter_model.safetensors")
    wait_for(lambda: path.stat().st_ctime_ns > keys._since_ns, lambda: path.write_bytes(weights))


def test_adapters_are_identified_by_their_weights(tmp_path: Path) -> None:
    one, other = adapter_in(tmp_path / "one", b"one"), adapter_in(tmp_path / "other", b"other")
    keys, after_restart = AdapterKeys(), AdapterKeys()
    assert keys.of(None) is None
    assert keys.of(one) is keys.of(one), "the weights are read once"
    assert key_of(keys, one) == key_of(after_restart, one) != key_of(keys, other)


def test_if_the_files_of_an_adapter_change_its_requests_share_no_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = adapter_in(tmp_path / "one", b"old weights")
    keys = AdapterKeys()
    before = key_of(keys, adapter)
    replaced(keys, adapter, b"new weights")
    found = [before, key_of(keys, adapter), key_of(keys, adapter), key_of(AdapterKeys(), adapter)]
    assert len(set(found)) == 4
    assert len(caplog.records) == 1 and "restart the engine" in caplog.text


def test_an_adapter_that_changed_before_its_first_request_is_shared_with_no_other_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may have loaded it before the change, and loads it again under another number or in place."""
    adapter = adapter_in(tmp_path / "one", b"old weights")
    keys = AdapterKeys()
    replaced(keys, adapter, b"new weights")
    key = key_of(keys, adapter)
    assert len(caplog.records) == 1 and "adapter_model.safetensors has changed since the engine" in caplog.text
    assert key_of(keys, adapter) == key, "this engine finds its pages"
    others = [LoRARequest("an adapter", 2, adapter.path), LoRARequest("an adapter", 1, adapter.path, load_inplace=True)]
    restarted = AdapterKeys()
    assert len({key, *(key_of(keys, other) for other in others), key_of(restarted, adapter)}) == 4
    assert key_of(restarted, adapter) == key_of(AdapterKeys(), adapter), "after a restart it is shared"


def test_an_adapter_without_files_is_found_only_by_its_process() -> None:
    keys, adapter = AdapterKeys(), LoRARequest("an adapter", 1, "someone/adapter")
    assert key_of(keys, adapter) == key_of(keys, adapter) != key_of(AdapterKeys(), adapter)


def test_the_seed_of_block_hashes_is_in_the_namespace_before_vllm_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    default = digest_of()
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    assert digest_of() != default


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "attended to as a whole": ({}, {"non_causal": True}),
    "canvas": ({"is_diffusion": True}, {}),
    "pooling needs all tokens": ({"is_prefix_caching_supported": False}, {}),
    "pipeline parallelism": ({"pipeline_parallel_size": 2}, {}),
    "several nodes": ({"nnodes": 2}, {}),
    "context parallelism": ({"decode_context_parallel_size": 2}, {}),
    "use sha256": ({"prefix_caching_hash_algo": "xxhash"}, {}),
    "'kv_both'": ({"kv_role": "kv_producer"}, {}),
    "two images": (
        {"multimodal_config": SimpleNamespace(mm_processor_cache_gb=0), "enable_prefix_caching": False}, {},
    ),
}


def open_engine(changes: dict[str, Any], spec: dict[str, Any], groups: int = 1) -> VllmEngine:
    group = SimpleNamespace(kv_cache_spec=dataclasses.replace(SPEC, **spec), layer_names=["layer"])
    cache: Any = SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=64, kv_tp_replicas=1)
    return VllmEngine.of(vllm_config(**changes), cache)


def test_an_engine_with_full_attention_is_served() -> None:
    assert open_engine({}, {}).layout.shape.tokens == 64


def test_data_parallel_engines_cannot_have_a_share_of_memory_and_one_engine_can(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_HOST__SIZE", "12.5%")
    assert str(open_engine({}, {}).config.host.size) == "12.5%"
    with pytest.raises(ConfigError, match=r"host\.size: .* with 2 data-parallel ranks write a size"):
        open_engine({"data_parallel_size": 2}, {})


def warnings_for(changes: dict[str, Any], specs: list[FullAttentionSpec], caplog: pytest.LogCaptureFixture) -> str:
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(kv_cache_specs=dict(enumerate(specs))))]
    cache: Any = SimpleNamespace(kv_cache_groups=groups)
    caplog.clear()
    vllm_engine.warn_of_settings(vllm_config(**changes), cache)
    return caplog.text


def test_a_window_that_is_kept_whole_is_a_warning_that_names_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    window = dataclasses.replace(SPEC, sliding_window=512)
    text = warnings_for({}, [SPEC, window], caplog)
    assert "only to the last 512 tokens" in text and "--disable-hybrid-kv-cache-manager" in text
    assert not warnings_for({}, [SPEC, SPEC], caplog)
    assert not warnings_for({"max_model_len": 512}, [SPEC, window], caplog)  # no prompt is longer than the window
    assert "'recompute'" in warnings_for({"kv_load_failure_policy": "fail"}, [SPEC], caplog)


def test_events_of_a_data_parallel_rank_name_it() -> None:
    assert open_engine({"data_parallel_size": 2, "data_parallel_index": 1}, {}).config.events.data_parallel_rank == 1
    assert open_engine({}, {}).config.events.data_parallel_rank is None


@pytest.mark.parametrize("what", REFUSED)
def test_an_unsupported_configuration_is_rejected_at_the_start(what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        open_engine(*REFUSED[what])


@pytest.mark.parametrize("what", REFUSED)
def test_the_page_of_engines_quotes_the_message(repository: Path, what: str) -> None:
    page = (repository / "docs" / "engines.md").read_text()
    section = page.partition("### Not supported\n")[2].partition("\n#")[0]
    quoted = re.findall(r"^\|.*\| `(.*?)`", section, flags=re.MULTILINE)
    with pytest.raises(ConfigError) as refused:
        open_engine(*REFUSED[what])
    assert any(message in str(refused.value) for message in quoted)


def test_memory_that_is_not_pinned_is_rejected_only_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_HOST__PIN", "off")
    assert open_engine({}, {}).config.host.pin == "off"
    monkeypatch.setattr(vllm_engine, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    with pytest.raises(ConfigError, match=r"host\.pin: 'off' .* use auto or on"):
        open_engine({}, {})
    monkeypatch.delenv("HICACHE_HOST__PIN")
    assert open_engine({}, {}).config.host.pin == "auto"


def test_engines_with_one_configuration_do_not_share_frames() -> None:
    name = f"vllm-test-{os.getpid()}"
    config = HiCacheConfig.model_validate({"page_size": 64, "host": {"tokens": 512, "shared": {"name": name}}})
    layout = BlockLayout(16, 64, (128,), 1)
    first, second, third = (
        VllmEngine(config, layout, ("layer",), 8, False, "specs", vllm_config(data_parallel_index=rank))
        for rank in (0, 0, 1)
    )
    with ExitStack() as undo:
        scheduler = first.open_pool(worker=False)
        undo.callback(scheduler.unlink)
        assert first.open_pool(worker=True).identity == scheduler.identity
        with pytest.raises(SharedMemoryError, match="belongs to another engine"):
            second.open_pool(worker=False)
        other = third.open_pool(worker=False)
        undo.callback(other.unlink)
        assert other.identity != scheduler.identity


@pytest.mark.parametrize(
    ("level", "has_handler", "vllm_has", "is_own"),
    [("WARNING", True, True, True), ("INFO", False, True, True), ("INFO", True, True, False),
     ("WARNING", True, False, False)],
)
def test_the_log_goes_to_vllm_s_handlers_unless_the_program_logs_as_much(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, level: str, has_handler: bool, vllm_has: bool, is_own: bool
) -> None:
    """A library that calls `logging.debug` gives the root logger a handler, and its level stays WARNING. With
    VLLM_CONFIGURE_LOGGING=0 vLLM has no handlers, and the program's get HiCache's warnings."""
    root, theirs = logging.getLogger(), logging.getLogger("vllm")
    monkeypatch.setattr(root, "handlers", [logging.NullHandler()] if has_handler else [])
    monkeypatch.setattr(root, "level", logging.getLevelName(level))
    monkeypatch.setattr(theirs, "handlers", [logging.NullHandler()] if vllm_has else [])
    monkeypatch.setattr(theirs, "level", logging.INFO)
    monkeypatch.setattr(log, "handlers", [])
    log.setLevel(logging.NOTSET)
    log_as_vllm()
    assert log.handlers == (theirs.handlers if is_own else [])
    assert logging.getLevelName(log.getEffectiveLevel()) == ("INFO" if is_own else level)
    assert log.propagate is not is_own

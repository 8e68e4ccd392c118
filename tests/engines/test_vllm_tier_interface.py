"""The parts of vLLM that HiCacheTier uses, compared with the installed wheel: a rename upstream fails a test.

The tests call the adapter as vLLM's manager does. No engine starts.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.errors import ConfigError
from hicache.frame import FrameHeader
from tests.waiting import wait_for

with warnings.catch_warnings():  # from vLLM and its imports
    warnings.simplefilter("ignore")
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_hints import KvHintsEnvelope
    from vllm.v1.kv_offload.base import (
        LookupResult,
        Medium,
        OffloadingEvent,
        OffloadingKVEventsConfig,
        OffloadPolicy,
        ReqContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig, OffloadingParallelConfig
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

    from hicache.integrations.vllm_tier import HiCacheTier

ROWS, ROW_BYTES = 8, 4096

# The methods of a tier with their parameters.
SIGNATURES = {
    "__init__": ["self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"],
    "lookup": ["self", "key", "req_context"],
    "submit_store": ["self", "job_metadata"],
    "submit_load": ["self", "job_metadata"],
    "get_finished_jobs": ["self"],
    "on_new_request": ["self", "req_context"],
    "on_request_finished": ["self", "req_context"],
    "on_schedule_end": ["self", "context"],
    "drain_jobs": ["self"],
    "shutdown": ["self"],
    "take_events": ["self"],
}
# HiCacheTier implements all abstract methods; these keep vLLM's defaults.
DEFAULTS = {
    "has_pending_work", "touch", "serve_external_requests", "build_metric_definitions", "get_stats",
}
FIELDS = {
    TransferJob: {"job_id", "keys", "chunk_ids"},
    JobResult: {"job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"},
    OffloadingEvent: {"keys", "medium", "removed", "locality", "removal_expected"},
    OffloadingKVEventsConfig: {"enable_kv_cache_events", "self_describing_kv_events"},
    OffloadingGroupConfig: {"group_id", "tokens_per_block", "layer_names"},
    OffloadingParallelConfig: {"tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"},
    OffloadingConfig: {
        "groups", "model", "cache", "parallel", "kv_cache_layout", "canonical_layout", "replicated_layout",
    },
}


def test_the_adapter_has_the_methods_of_a_tier() -> None:
    methods = {name for name, _ in inspect.getmembers(SecondaryTierManager, callable) if name[0] != "_"}
    assert methods == {*SIGNATURES, *DEFAULTS} - {"__init__"}
    for name, parameters in SIGNATURES.items():
        assert list(inspect.signature(getattr(SecondaryTierManager, name)).parameters) == parameters, name
        assert list(inspect.signature(getattr(HiCacheTier, name)).parameters)[: len(parameters)] == parameters, name


def test_names_that_the_adapter_reads_exist() -> None:
    for kind, names in FIELDS.items():
        assert names <= {field.name for field in dataclasses.fields(kind)}, kind
    assert Medium.STORAGE and LookupResult.RETRY and OffloadPolicy.CHUNK_LEVEL
    assert "NONE_HASH" in vars(kv_cache_utils) or "NONE_HASH" in kv_cache_utils.__annotations__


def test_a_reset_of_the_cache_is_the_only_reason_to_drain() -> None:
    """The adapter treats a drain as new weights; a drain for another reason would invalidate all stored chunks."""
    source = inspect.getsource(TieringOffloadingManager)
    assert source.count("drain_jobs()") == source.count("tier.drain_jobs()") + 1  # one more mention is in prose
    assert "drain_jobs()" in inspect.getsource(TieringOffloadingManager.reset_cache)


# The adapter


@pytest.fixture
def root_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set vLLM's root hash, which it otherwise sets when an engine starts."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"\1" * 32, raising=False)


def spec(**changes: object) -> types.SimpleNamespace:
    """Return the parts of an OffloadingSpec that a tier reads."""
    parallel = types.SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_size=1)
    config = types.SimpleNamespace(
        groups=(OffloadingGroupConfig(tokens_per_block=32, layer_names=("layer.0",), group_id=0),),
        model=types.SimpleNamespace(name="org/model", dtype="float32"),
        cache=types.SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=2),
        parallel=parallel, kv_cache_layout="LBHNC", canonical_layout=False, replicated_layout=False,
    )
    vars(config).update(changes)
    return types.SimpleNamespace(config=config, kv_events_config=OffloadingKVEventsConfig(True, True))


class Primary:
    """Rows of a primary tier, and a tier over them from vLLM's factory."""

    def __init__(
        self, folder: Path, changes: dict[str, object] | None = None, *, capacity: str = "1GiB",
        events: OffloadingKVEventsConfig | None = None, **options: object,
    ) -> None:
        config = folder / "hicache.yaml"
        store = {"path": str(folder / "store"), "capacity": capacity, "free_space_floor": 0}
        config.write_text(json.dumps({"storage": {"type": "file", "options": store}}))
        self.rows = np.zeros((ROWS, ROW_BYTES), dtype=np.int8)
        of_engine = spec(**(changes or {}))
        of_engine.kv_events_config = events or of_engine.kv_events_config
        entry = {"type": "HiCacheTier", "module_path": "hicache.integrations.vllm_tier", "config": str(config)}
        self.tier = SecondaryTierFactory.create_secondary_tier(
            {**entry, "model": "weights 1", **options}, memoryview(self.rows.data), of_engine
        )
        self.results: dict[int, JobResult] = {}

    def step(self) -> None:
        self.results |= {result.job_id: result for result in self.tier.get_finished_jobs()}
        self.tier.on_schedule_end(None)

    def find(self, keys: list[bytes], request: ReqContext) -> list[LookupResult]:
        found: list[LookupResult] = []

        def ask() -> bool:
            found[:] = [self.tier.lookup(key, request) for key in keys]
            return LookupResult.RETRY not in found

        wait_for(ask, self.step)
        return found

    def run(self, number: int, keys: list[bytes], rows: list[int], request: ReqContext, *, load: bool) -> JobResult:
        job = TransferJob(number, keys, np.array(rows, dtype=np.int32), load, request)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        wait_for(lambda: number in self.results, self.step)
        return self.results[number]


@pytest.fixture
def primary(tmp_path: Path, root_hash: None) -> Iterator[Primary]:
    made = Primary(tmp_path)
    yield made
    made.tier.shutdown()


def test_chunks_are_stored_and_loaded_through_the_adapter(primary: Primary) -> None:
    request = ReqContext("r")
    keys = [make_offload_key(bytes([i]) * 32, i) for i in range(3)]
    primary.rows[1], primary.rows[2] = 11, 22
    assert primary.tier.on_new_request(request).policy is OffloadPolicy.CHUNK_LEVEL
    stored = primary.run(1, keys[:2], [1, 2], request, load=False)
    assert (stored.success, stored.transfer_bytes) == (True, 2 * ROW_BYTES)
    assert primary.find(keys, request) == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]
    loaded = primary.run(2, keys, [5, 6, 7], request, load=True)
    assert not loaded.success and list(loaded.successful_keys or ()) == keys[:2]
    assert primary.rows[5:7, 0].tolist() == [11, 22]
    primary.tier.on_request_finished(request)
    primary.tier.drain_jobs()
    assert LookupResult.HIT not in primary.find(keys, ReqContext("s"))


def test_hints_are_a_warning_once(primary: Primary, caplog: pytest.LogCaptureFixture) -> None:
    primary.tier.on_new_request(ReqContext("none", kv_transfer_params={}))
    assert not caplog.records
    for name in ("kv_hints", "kv_hint"):
        primary.tier.on_new_request(ReqContext(name, kv_transfer_params={name: {"actions": []}}))
        primary.tier.on_new_request(ReqContext(name, kv_hints=KvHintsEnvelope("0.1", "", [])))
    assert [record.getMessage() for record in caplog.records] == [
        "vllm tier: hints are not carried out, because vLLM itself evicts from its host memory; models with full "
        "attention have them with HiCacheConnector"
    ]


def test_stored_chunks_are_announced_until_they_are_gone(primary: Primary, tmp_path: Path) -> None:
    def news() -> list[tuple[list[bytes], bool]]:
        return [(list(event.keys), event.removed) for event in primary.tier.take_events()]

    request = ReqContext("r")
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(4)]
    primary.run(1, keys[:3], [1, 2, 3], request, load=False)
    assert news() == [(keys[:3], False)]
    primary.run(2, keys[:2], [1, 2], request, load=False)  # announced already
    primary.run(3, keys[2:], [5, 6], request, load=True)  # the last one is not stored
    assert news() == []
    pages = [page for page in (tmp_path / "store").rglob("*") if page.is_file() and page.stat().st_size >= ROW_BYTES]
    assert len(pages) >= 3
    for page in pages:
        page.unlink()
    primary.find(keys[:1], request)
    primary.run(5, keys[:1], [1], request, load=True)
    assert primary.find(keys[:1], request) == [LookupResult.MISS]
    assert news() == [(keys[:1], True)]
    primary.run(4, keys[:1], [1], request, load=False)
    primary.tier.drain_jobs()
    assert news() == [(keys[:1], False), ([*keys[1:3], keys[0]], True)]


def test_evictions_of_a_store_in_the_process_withdraw_chunks(tmp_path: Path, root_hash: None) -> None:
    primary = Primary(tmp_path, capacity="1MiB")
    keys = [make_offload_key(i.to_bytes(32, "big"), 0) for i in range(32 * ROWS)]
    for number in range(32):
        part = keys[number * ROWS : (number + 1) * ROWS]
        primary.run(number, part, list(range(ROWS)), ReqContext("r"), load=False)
    withdrawn: list[bytes] = []
    wait_for(lambda: withdrawn != [], lambda: withdrawn.extend(
        key for event in primary.tier.take_events() if event.removed for key in event.keys
    ))
    assert set(withdrawn) < set(keys)
    primary.tier.shutdown()


def test_without_events_of_tokens_nothing_is_announced(tmp_path: Path, root_hash: None) -> None:
    primary = Primary(tmp_path, events=OffloadingKVEventsConfig(True, False))
    primary.run(1, [make_offload_key(bytes(32), 0)], [1], ReqContext("r"), load=False)
    assert primary.tier.take_events() == []
    primary.tier.shutdown()


@pytest.mark.parametrize(
    ("blocks", "numbers", "warns"),
    [(8, [0], True), (8, [0, 1], False), (1, [0], False)],
    ids=["no state", "state", "single blocks"],
)
def test_a_group_without_chunks_is_reported_once(
    tmp_path: Path, root_hash: None, caplog: pytest.LogCaptureFixture, blocks: int, numbers: list[int], warns: bool
) -> None:
    groups = tuple(
        OffloadingGroupConfig(tokens_per_block=32, layer_names=(f"layer.{number}",), group_id=number)
        for number in range(2)
    )
    cache = types.SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=blocks)
    primary, request = Primary(tmp_path, {"groups": groups, "cache": cache}), ReqContext("r")
    for number in range(60):
        keys = [make_offload_key(bytes([number, group]) * 16, group) for group in numbers for _ in range(2)]
        primary.run(number, keys, [0] * len(keys), request, load=False)
    primary.tier.shutdown()
    assert caplog.text.count("is of layer layer.1, so no prompt can hit; remove blocks_per_chunk") == warns


def test_stored_chunks_are_labelled_with_the_name_of_the_model(primary: Primary, tmp_path: Path) -> None:
    assert primary.run(1, [make_offload_key(b"\1" * 32, 0)], [1], ReqContext("r"), load=False).success
    pages = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and len(path.name) == 64]
    headers = [FrameHeader.parse(path.read_bytes()) for path in pages]
    assert [header and header.label for header in headers] == ["model"]


def test_a_name_without_a_folder_does_not_identify_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set the option 'model'"):
        Primary(tmp_path, model=None)


def test_unknown_options_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="in_plcae"):
        Primary(tmp_path, in_plcae=True)

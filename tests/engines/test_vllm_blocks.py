"""The blocks that the connector describes have the fields of vLLM's own events for the same blocks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from hicache.config import EventsConfig
from hicache.events import Cleared, EventStream, Medium, Removed, Stored
from hicache.integrations.vllm.layout import BlockLayout
from hicache.keys import RadixKey, namespace_seed

with warnings.catch_warnings():  # from vLLM and its imports
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.request import Request

    from hicache.integrations.vllm.blocks import BlockDescriber, BlockEvents, describer

BLOCK, PER_PAGE, PAGES = 16, 4, 2
LAYOUT = BlockLayout(BLOCK, BLOCK * PER_PAGE, (128,), 1)
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
IMAGE = MultiModalFeatureSpec(
    data=None, modality="image", identifier="an image", mm_position=PlaceholderRange(offset=20, length=40)
)
INPUTS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "adapter": {"lora_request": LoRARequest("an adapter", 3, "/adapters/one")},
    "salt": {"cache_salt": "a tenant"},
    "image": {"mm_features": [IMAGE]},
    "all": {
        "lora_request": LoRARequest("an adapter", 3, "/adapters/one"), "cache_salt": "a tenant", "mm_features": [IMAGE],
    },
}


def request_of(**inputs: Any) -> Request:
    init_none_hash(sha256)
    return Request(
        "r", list(range(100, 100 + BLOCK * PER_PAGE * PAGES)), SamplingParams(max_tokens=1), None,
        block_hasher=get_request_block_hasher(BLOCK, sha256), **inputs,
    )


def of_device(request: Request) -> BlockStored:
    """Return vLLM's event of all blocks of a request on its device."""
    pool = BlockPool(64, True, BLOCK, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(PER_PAGE * PAGES)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK, 0)
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    event.kv_cache_spec_kind = "full_attention"  # as vLLM's manager does
    return event


def taken(request: Request, *more: Removed | Cleared, salts: bool = True, media: str = "vllm") -> list[Any]:
    """Return the connector's events of all pages of a request on the host."""
    describe = BlockDescriber(LAYOUT, SPEC, salts=salts)
    keys = RadixKey.of_hashes(request.block_hashes[PER_PAGE - 1 :: PER_PAGE]).page_keys(BLOCK * PER_PAGE, b"", 0, PAGES)
    blocks = tuple(describe(request, page) for page in range(PAGES))
    stream = EventStream(1 << 20)
    events = BlockEvents(stream.subscribe(), media)
    for event in (Stored(Medium.HOST, tuple(keys), None, b"", b"", BLOCK * PER_PAGE, blocks=blocks), *more):
        stream.put(event)
    return list(events.take())


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_blocks_on_the_host_have_the_fields_of_the_same_blocks_on_the_device(inputs: dict[str, Any]) -> None:
    request = request_of(**inputs)
    (event,) = taken(request)
    expected = copy.copy(of_device(request))
    expected.medium = "CPU"
    assert event == expected
    (event,) = taken(request, media="sglang")
    assert event.medium == "CPU_PINNED"


def test_the_salt_is_replaced_where_salts_are_not_published() -> None:
    request = request_of(**INPUTS["all"])
    (event,) = taken(request, salts=False)
    seed = namespace_seed(None, "a tenant")
    assert event.extra_keys[0] == ("an adapter", seed)
    assert "a tenant" not in repr(event)
    assert "a tenant" in repr(taken(request)[0])  # control


def test_blocks_are_described_only_for_published_tokens() -> None:
    published: dict[str, Any] = {"endpoint": "tcp://127.0.0.1:5557"}
    assert [
        describer(EventsConfig(**section), LAYOUT, SPEC, in_vllm=in_vllm) is not None
        for section, in_vllm in [
            ({}, False), ({}, True), (published, False), ({"token_ids": False}, True),
            ({"token_ids": False, **published}, False),
        ]
    ] == [False, True, True, False, False]


def test_a_gap_withdraws_the_blocks_and_not_those_of_the_device() -> None:
    request = request_of()
    stored, gone = taken(request, Cleared())
    assert isinstance(gone, BlockRemoved) and gone.medium == "CPU"
    assert set(gone.block_hashes) == set(stored.block_hashes)

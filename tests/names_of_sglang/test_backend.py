"""RadixAttention in front of a backend of the user's, as SGLang's attention layer."""

from __future__ import annotations

import torch

from hicache.attention import AttentionBatch, Queries, RadixAttention
from hicache.geometry import KVGeometry
from hicache.tiers import MHATokenToKVPool, token_slots

GEOMETRY = KVGeometry(layers=2, heads=2, head_dim=8, page_size=4, dtype="float32")


class Recording:
    """A backend that notes its calls, and writes the KV as it must."""

    def __init__(self) -> None:
        self.calls: list[tuple[RadixAttention, bool]] = []

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: RadixAttention,
        batch: AttentionBatch, save_kv_cache: bool,
    ) -> torch.Tensor:
        self.calls.append((layer, save_kv_cache))
        if save_kv_cache and k is not None and v is not None:
            assert isinstance(batch.pool, MHATokenToKVPool)
            batch.pool.set_kv_buffer(layer.layer, batch.slots, k, v)
        return q * 2


def test_the_layer_passes_shaped_tensors_and_itself_to_the_backend_of_the_batch() -> None:
    pool, backend = MHATokenToKVPool(GEOMETRY, 4), Recording()
    pages = pool.allocator.alloc(2)
    assert pages is not None
    table = torch.from_numpy(token_slots(pages, 4)).to(torch.int32)[None]
    batch = AttentionBatch(pool, table, [Queries(row=0, start=5, count=2)], backend)
    layer = RadixAttention(2, 8, 2, 1, pos_encoding_mode="ALIBI")
    q, k, v = (torch.rand(2, 16) for _ in range(3))
    assert torch.equal(layer(q, k, v, batch), q * 2)
    assert torch.equal(pool.get_kv_buffer(1)[0][2, [1, 2]].flatten(1), k)
    layer(q, k, v, batch, save_kv_cache=False)
    assert backend.calls == [(layer, True), (layer, False)]


def test_a_backend_finds_the_pages_of_each_request_as_paged_kernels_take_them() -> None:
    pool = MHATokenToKVPool(GEOMETRY, 4)
    table = torch.stack([torch.arange(8, 16), torch.arange(4, 12)]).to(torch.int32)
    batch = AttentionBatch(pool, table, [Queries(row=0, start=5, count=2), Queries(row=1, start=0, count=3)])
    keys = batch.paged_keys()
    assert keys.query_indptr.tolist() == [0, 2, 5] and keys.lengths.tolist() == [7, 3]
    assert keys.page_indptr.tolist() == [0, 2, 3] and keys.pages.tolist() == [2, 3, 1]
    assert keys.last_page_tokens.tolist() == [3, 3]


def test_cross_attention_sees_the_keys_of_the_encoder_and_only_those() -> None:
    pool = MHATokenToKVPool(GEOMETRY, 4)
    table = torch.stack([torch.arange(4, 12), torch.arange(12, 20)]).to(torch.int32)
    k, v = torch.rand(3, 2, 8), torch.rand(3, 2, 8)
    pool.set_kv_buffer(0, table[1, :3].long(), k, v)
    batch = AttentionBatch(pool, table, [Queries(row=0, start=0, count=2, encoder_row=1, encoder_tokens=3)])
    q = torch.rand(2, 2, 8)
    with torch.inference_mode():
        got = RadixAttention(2, 8, 2, 0, is_cross_attention=True)(q, None, None, batch)
    weights = (torch.einsum("qhd,khd->hqk", q, k) / 8**0.5).softmax(-1)
    torch.testing.assert_close(got, torch.einsum("hqk,khd->qhd", weights, v).reshape(2, 16))

"""RadixAttention compared with a dense reference in float64, over pools whose unused entries are NaN."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from hicache import attention
from hicache.attention import AttentionBatch, Queries, RadixAttention
from hicache.errors import InvalidInput, TransferError
from hicache.geometry import KVGeometry, KVLayout
from hicache.tiers import (
    EngineBlocks,
    FailedTransfer,
    HostPool,
    HostWindow,
    KVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    RequestToTokenPool,
    Transfer,
    create_device_pool,
    token_slots,
)
from hicache.tiers.copy import JoinedTransfer
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import Indices
from tests.seeds import rng, seeds

pytestmark = pytest.mark.long

CONTEXT = 64
# Cached tokens and new ones of each request: prefills with and without a prefix, decodes, several new tokens.
MIXED = [(0, 7), (5, 1), (21, 1), (20, 1), (33, 6), (0, 1), (16, 16), (47, 1)]


@dataclass(frozen=True)
class Shape:
    """Heads of a model. `head_dim` of MLA is the latent's, and V is a part of it."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    mla: bool = False

    def geometry(self, page_size: int, dtype: str = "float32") -> KVGeometry:
        layout, v_head_dim = (KVLayout.MLA, None) if self.mla else (KVLayout.MHA, self.v_head_dim)
        return KVGeometry(2, self.kv_heads, self.head_dim, page_size, dtype, layout, v_head_dim)

    def attention(self, layer: int = 1, **options: Any) -> RadixAttention:
        return RadixAttention(
            self.heads, self.head_dim, self.kv_heads, layer, v_head_dim=self.v_head_dim, **options
        )


SHAPES = {
    "mha": Shape(4, 4, 16, 16),
    "gqa": Shape(6, 2, 16, 16),
    "wide-k": Shape(4, 2, 24, 16),
    "wide-v": Shape(4, 2, 8, 16),
    "mla": Shape(4, 1, 24, 16, mla=True),
}


class Forward:
    """Requests with a cached prefix in scattered pages, and the new tokens of a forward; all else in the pool is NaN.

    `k` and `v` are of all tokens of each request, `new_q`, `new_k` and `new_v` what a layer is given.
    """

    def __init__(
        self, shape: Shape, sizes: Sequence[tuple[int, int]] = MIXED, page_size: int = 4, *,
        dtype: str = "float32", compute: torch.dtype = torch.float32, seed: int = 0, window: int | None = None,
    ) -> None:
        self.shape, self.sizes, self.window = shape, sizes, window
        numbers = torch.Generator().manual_seed(seed)
        pages = sum(-(-sum(size) // page_size) for size in sizes)
        pool = create_device_pool(shape.geometry(page_size, dtype), pages + 3)
        assert isinstance(pool, MHATokenToKVPool | MLATokenToKVPool)
        self.pool = pool
        for layer in pool.kv_buffer:
            layer.fill_(math.nan)
        self.table = torch.full((len(sizes) + 1, CONTEXT), 10**6, dtype=torch.int32)  # stale slots of another pool
        free = torch.randperm(pages, generator=numbers).to(torch.int32) + 1
        self.k, self.v, self.queries, self.slots = [], [], [], []
        for row, (cached, new) in enumerate(sizes):
            total = cached + new
            mine, free = free[: -(-total // page_size)], free[-(-total // page_size) :]
            slots = torch.from_numpy(token_slots(mine.numpy(), page_size))[:total]
            self.table[row, :total] = slots.to(torch.int32)
            self.slots.append(slots)
            # In the values that the pool's dtype has.
            k, v = (
                torch.randn(total, shape.kv_heads, dim, generator=numbers).to(pool.dtype).to(compute)
                for dim in (shape.head_dim, shape.v_head_dim)
            )
            self.k.append(k)
            self.v.append(k[..., : shape.v_head_dim] if shape.mla else v)
            self.queries.append(Queries(row, cached, new))
            self.write(row, slice(cached))
        self.new_k, self.new_v = (
            torch.cat([part[cached:] for part, (cached, _) in zip(parts, sizes, strict=True)])
            for parts in (self.k, self.v)
        )
        self.new_q = torch.randn(len(self.new_k), shape.heads, shape.head_dim, generator=numbers).to(compute)

    def write(self, row: int, tokens: slice, layer: int = 1) -> None:
        k, v = (parts[row][tokens].to(self.pool.dtype) for parts in (self.k, self.v))
        self.pool.set_kv_buffer(layer, self.slots[row][tokens], *((k,) if self.shape.mla else (k, v)))

    def batch(self) -> AttentionBatch:
        return AttentionBatch(self.pool, self.table, self.queries)

    def run(self, *, save_kv_cache: bool = True, given: bool = True, **options: Any) -> torch.Tensor:
        v = None if self.shape.mla else self.new_v
        k, v = (self.new_k, v) if given else (None, None)
        layer = self.shape.attention(**options, sliding_window=self.window)
        result: torch.Tensor = layer(self.new_q, k, v, self.batch(), save_kv_cache)
        return result

    def expected(self, *, scale: float | None = None, logit_cap: float | None = None) -> torch.Tensor:
        """Return the expected result, one query and head at a time, `[tokens, heads * v_head_dim]`."""
        shape, rows = self.shape, []
        scale = shape.head_dim**-0.5 if scale is None else scale
        queries = iter(self.new_q.double())
        for (cached, new), k, v in zip(self.sizes, self.k, self.v, strict=True):
            for position in range(cached, cached + new):
                first = 0 if self.window is None else max(0, position - self.window + 1)
                query, heads = next(queries), []
                for head in range(shape.heads):
                    shared = head * shape.kv_heads // shape.heads
                    logits = (k[first : position + 1, shared].double() @ query[head]) * scale
                    if logit_cap is not None:
                        logits = (logits / logit_cap).tanh() * logit_cap
                    heads.append(torch.softmax(logits, 0) @ v[first : position + 1, shared].double())
                rows.append(torch.cat(heads))
        return torch.stack(rows)


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert expected.std() > 0.1
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("page_size", "cap", "window"), [(1, None, 20), (4, 1.5, 7), (16, None, None), (4, None, 1)])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_mixed_batch_over_scattered_pages_equals_dense_attention(
    kind: str, page_size: int, cap: float | None, window: int | None
) -> None:
    world = Forward(SHAPES[kind], page_size=page_size, window=window)
    close(world.run(logit_cap=cap), world.expected(logit_cap=cap))


@pytest.mark.parametrize("seed", seeds(6))
def test_random_batches_equal_dense_attention(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = rng(seed)
    monkeypatch.setattr(attention, "ROWS_MAX", numbers.choice([1, 6, 16, 2048]))  # cuts prefills and splits groups
    monkeypatch.setattr(attention, "KEYS_MAX", numbers.choice([1, 64, 1 << 16]))
    sizes = [(numbers.choice([0, 0, 3, 8, 30]), numbers.choice([1, 1, 2, 9, 25])) for _ in range(numbers.randint(1, 9))]
    window, cap = numbers.choice([None, 3, 12]), numbers.choice([None, 2.0])
    shape, page_size = SHAPES[numbers.choice(list(SHAPES))], numbers.choice([1, 2, 4, 16])
    world, saves = Forward(shape, sizes, page_size, window=window, seed=seed), numbers.random() < 0.5
    close(world.run(logit_cap=cap, save_kv_cache=saves), world.expected(logit_cap=cap))


@pytest.mark.parametrize("change", ["scale", "logit_cap", "window"])
def test_each_option_changes_the_result(change: str) -> None:
    """The negative control: the comparison detects an ignored option."""
    world = Forward(SHAPES["gqa"], window=5)
    result = world.run(scale=0.3, logit_cap=1.5)
    close(result, world.expected(scale=0.3, logit_cap=1.5))
    if change == "window":
        world.window = 6
    options = {"scale": 0.3, "logit_cap": 1.5} | ({change: 2.0} if change != "window" else {})
    with pytest.raises(AssertionError):
        close(result, world.expected(**options))


@pytest.mark.parametrize(
    ("dtype", "compute", "tolerance"),
    [
        ("bfloat16", torch.bfloat16, 2e-2), ("float16", torch.float16, 2e-3), ("bfloat16", torch.float32, 1e-5),
        ("float8_e4m3fn", torch.bfloat16, 2e-2), ("float8_e4m3fn", torch.float32, 1e-5),
        ("float8_e5m2", torch.float16, 2e-3), ("float32", torch.float64, 1e-6),
    ],
)
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_kv_of_the_pool_is_read_in_the_dtype_of_the_queries(
    kind: str, dtype: str, compute: torch.dtype, tolerance: float
) -> None:
    world = Forward(SHAPES[kind], dtype=dtype, compute=compute)
    result = world.run(logit_cap=1.5)
    assert result.dtype is compute
    close(result, world.expected(logit_cap=1.5), tolerance)


@pytest.mark.parametrize(("kind", "window"), [("gqa", None), ("wide-k", 7), ("mla", 7)])
def test_without_saving_the_result_is_the_same_and_the_pool_is_unchanged(kind: str, window: int | None) -> None:
    world = Forward(SHAPES[kind], dtype="bfloat16", window=window)
    world.new_k, world.new_v = world.new_k * 1.001, world.new_v * 1.001  # values that the pool would round
    before = [layer.clone().view(torch.uint8) for layer in world.pool.kv_buffer]
    result = world.run(save_kv_cache=False)
    assert all(map(torch.equal, before, (layer.view(torch.uint8) for layer in world.pool.kv_buffer)))
    assert not result.isnan().any() and torch.equal(result, world.run())
    assert torch.equal(result, world.run(given=False)), "and so it is for KV that the pool has already"
    assert not torch.equal(before[1], world.pool.kv_buffer[1].view(torch.uint8)), "the control: a saving run writes"


def test_saving_writes_the_new_tokens_of_one_layer_only() -> None:
    world = Forward(SHAPES["gqa"])
    reference = Forward(SHAPES["gqa"])
    world.run()
    for row, (cached, _) in enumerate(world.sizes):
        reference.write(row, slice(cached, None))
    for layer in range(2):
        for found, expected in zip(world.pool.kv_buffer[layer], reference.pool.kv_buffer[layer], strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_a_request_reads_only_its_own_keys() -> None:
    """The control of the NaN in unused entries: a NaN in a key reaches only the request that reads it."""
    world = Forward(SHAPES["gqa"])
    clean = world.run()
    world.k[4][30] = math.nan
    world.write(4, slice(30, 31))
    damaged = torch.tensor([row == 4 for row, (_, new) in enumerate(world.sizes) for _ in range(new)])
    result = world.run()
    assert result[damaged].isnan().any(dim=1).all() and torch.equal(result[~damaged], clean[~damaged])


def test_pages_before_the_window_are_not_read() -> None:
    world = Forward(SHAPES["gqa"], [(40, 1)], page_size=4, window=8)
    expected = world.expected()
    world.table[0, :32] = 10**6  # the window begins at position 33
    close(world.run(), expected)


@pytest.mark.parametrize("save_kv_cache", [True, False])
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_padding_of_a_fixed_shape_changes_nothing(kind: str, save_kv_cache: bool) -> None:
    sizes, shape = [(21, 3), (0, 5), (16, 4)], SHAPES[kind]
    world = Forward(shape, sizes)
    expected, padded = world.expected(), []
    queries, parts, token = [], [[], [], []], 0  # type: tuple[list[Queries], list[list[torch.Tensor]], int]
    for row, (cached, new) in enumerate(sizes):
        before, behind = cached % 8, 8 - cached % 8 - new
        queries.append(Queries(row, cached - before, 8, before, behind))
        for part, tensor in zip(parts, (world.new_q, world.new_k, world.new_v), strict=True):
            piece = tensor[token : token + new]
            part.append(torch.cat((torch.ones_like(piece[:1]).repeat(before, 1, 1), piece,
                                   torch.ones_like(piece[:1]).repeat(behind, 1, 1))))
        padded += [before <= index < before + new for index in range(8)]
        token += new
    world.queries, (world.new_q, world.new_k, world.new_v) = queries, map(torch.cat, parts)
    computed = torch.tensor(padded)
    close(world.run(save_kv_cache=save_kv_cache)[computed], expected)
    if save_kv_cache:
        used = torch.cat(world.slots) // 4
        unused = [page for page in range(1, world.pool.pages + 1) if page not in used.tolist()]
        assert world.pool.kv_buffer[1][unused].isnan().all(), "KV of padding goes to the padding page"


def test_decodes_are_one_product_without_padding_to_the_longest_request() -> None:
    shape = SHAPES["gqa"]
    world = Forward(shape, [(20, 1), (30, 1), (25, 1), (19, 1)])
    assert [len(group.blocks) for group in world.batch().groups(None, 3)] == [4]
    world = Forward(shape, [(1, 1), (2, 1), (62, 1), (3, 1)])
    assert sorted((len(group.blocks), group.keys) for group in world.batch().groups(None, 3)) == [(1, 64), (3, 16)]
    batch = world.batch()
    assert batch.groups(None, 3) is batch.groups(None, 3), "made once for all layers"


def test_keys_of_a_product_and_the_memory_of_a_batch_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "KEYS_MAX", 128)
    decodes = Forward(SHAPES["gqa"], [(40, 1)] * 9).batch().groups(None, 3)
    assert [(len(group.blocks), group.keys) for group in decodes] == [(2, 48)] * 4 + [(1, 48)]
    prefill = Forward(SHAPES["gqa"], [(0, 60)]).batch().groups(None, 3)
    kept = [part for group in prefill for part in group if isinstance(part, torch.Tensor)]
    assert sum(part.numel() for part in kept) < 4 * 60, "less than the mask of one head, of which there are 60 * 64"


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_large_logits_are_capped_before_they_are_rounded(compute: torch.dtype) -> None:
    world = Forward(SHAPES["gqa"], dtype="bfloat16", compute=compute)
    scale, cap = 2.5, 50.0  # logits of about 10
    close(world.run(scale=scale, logit_cap=cap), world.expected(scale=scale, logit_cap=cap), 1e-2)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@pytest.mark.parametrize("options", [{}, {"logit_cap": 2.0}, {"sliding_window": 6}])
def test_host_decisions_do_not_depend_on_device_values(kind: str, options: dict[str, Any]) -> None:
    """Tensors without values represent those of a device whose work has not ended."""
    world, shape = Forward(SHAPES[kind]), SHAPES[kind]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        pool = create_device_pool(shape.geometry(4), world.pool.pages)
        q, k, v, table = (mode.from_tensor(some) for some in (world.new_q, world.new_k, world.new_v, world.table))
        batch = AttentionBatch(pool, table, world.queries)
        result = shape.attention(**options)(q, k, None if shape.mla else v, batch)
        assert result.shape == (len(q), shape.heads * shape.v_head_dim)
        with pytest.raises(DynamicOutputShapeException):
            q[q > 0]  # the control: to know how many these are, the host has to wait


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("options", [{}, {"logit_cap": 2.0}])
@pytest.mark.parametrize("window", [None, 7])
def test_on_cuda_it_is_dense_attention_without_waits(kind: str, options: dict[str, Any], window: int | None) -> None:
    shape = SHAPES[kind]
    world = Forward(shape, dtype="bfloat16", compute=torch.bfloat16, window=window)
    pool = create_device_pool(world.pool.geometry, world.pool.pages, "cuda")
    assert isinstance(pool, MHATokenToKVPool | MLATokenToKVPool)
    for there, here in zip(pool.kv_buffer, world.pool.kv_buffer, strict=True):
        there.copy_(here)
    q, k, v, table = (some.cuda() for some in (world.new_q, world.new_k, world.new_v, world.table))
    layer = shape.attention(sliding_window=window, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = layer(q, k, None if shape.mla else v, AttentionBatch(pool, table, world.queries))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(result.cpu(), world.expected(**options), 2e-2)


def test_caller_errors_are_rejected_and_change_nothing() -> None:
    world, shape = Forward(SHAPES["gqa"], [(4, 2)]), SHAPES["gqa"]
    pool, table, batch = world.pool, world.table, world.batch()
    for bad in (Queries(2, 0, 1), Queries(0, -1, 1), Queries(0, 0, 0), Queries(0, 60, 5), Queries(0, 0, 4, 3, 1),
                Queries(0, 0, 4, -1)):
        with pytest.raises(InvalidInput, match="queries"):
            AttentionBatch(pool, table, [bad])
    with pytest.raises(InvalidInput, match="queries is empty"):
        AttentionBatch(pool, table, [])
    for other in (KVPool(pool.geometry, pool.blocks), create_device_pool(shape.geometry(4, "int8"), 2)):
        with pytest.raises(InvalidInput, match="floating-point"):
            AttentionBatch(other, table, world.queries)
    for wrong in ({"heads": 5}, {"heads": 0}, {"layer": -1}, {"scale": 0.0}, {"logit_cap": -1.0}, {"logit_cap": 0.0},
                  {"sliding_window": 0}, {"v_head_dim": 0}):
        arguments: dict[str, Any] = {"heads": 6, "head_dim": 16, "kv_heads": 2, "layer": 1}
        with pytest.raises(InvalidInput, match="attention"):
            RadixAttention(**(arguments | wrong))
    before = pool.kv_buffer[1].clone().view(torch.uint8)
    q, k, v = world.new_q, world.new_k, world.new_v
    for layer in (shape.attention(layer=2), RadixAttention(6, 16, 3, 1), RadixAttention(6, 8, 2, 1),
                  RadixAttention(6, 16, 2, 1, v_head_dim=8)):
        with pytest.raises(InvalidInput, match="but the pool has 2 layers, 2 heads of 16"):
            layer(q, k, v, batch)
    for bad_q, bad_k, bad_v in ((q[:1], k, v), (q, k[:1], v), (q, k, v[..., :8]), (q, k, None), (q, None, v)):
        with pytest.raises(InvalidInput, match="attention"):
            shape.attention()(bad_q, bad_k, bad_v, batch)
    assert torch.equal(pool.kv_buffer[1].view(torch.uint8), before)


# The pool waits by itself


class OnDemand(CpuCopyEngine):
    """A copy engine that copies a layer only when a forward waits for it."""

    def __init__(self, blocks: EngineBlocks, window: HostWindow) -> None:
        self.wanted = threading.Semaphore(0)
        super().__init__(blocks, window)

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        self.wanted.acquire()
        super()._load_layer(layer, host_blocks, blocks)


class Demanding(JoinedTransfer):
    """A transfer that, on a wait, makes `copies` copy all layers up to the awaited one."""

    def __init__(self, transfer: Transfer, copies: OnDemand) -> None:
        super().__init__([transfer])
        self._copies = copies
        self.waited = 0

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        while self.waited <= layer:
            self._copies.wanted.release()
            self.waited += 1
        super().wait_layer(layer, stream)


@pytest.fixture(params=["gqa", "mla"])
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[Forward, Demanding]]:
    """Return a forward whose cached prefixes are only on L2, and their load to L1."""
    world = Forward(SHAPES[request.param])
    for row, (cached, _) in enumerate(world.sizes):
        world.write(row, slice(cached), layer=0)
    host = HostPool(world.pool.geometry, world.pool.pages)
    copies = OnDemand(world.pool.blocks, HostWindow(host))
    pages = np.arange(1, world.pool.pages + 1, dtype=np.int32)
    assert copies.backup(pages, pages - 1).wait(10)
    for layer in world.pool.kv_buffer:
        layer.fill_(math.nan)
    yield world, (transfer := Demanding(copies.load(pages - 1, pages), copies))
    transfer.wait_layer(1)
    assert copies.close(10)


def test_attention_waits_for_the_load_of_each_layer(loaded: tuple[Forward, Demanding]) -> None:
    world, transfer = loaded
    world.pool.loading = transfer
    v, batch = (None if world.shape.mla else world.new_v), world.batch()
    # The new tokens are not written: this load brings all pages of the pool.
    for layer in range(2):
        close(world.shape.attention(layer)(world.new_q, world.new_k, v, batch, False), world.expected())
        assert transfer.waited == layer + 1, "the forward waits only for this layer"


def test_without_the_wait_a_layer_is_read_before_its_load(loaded: tuple[Forward, Demanding]) -> None:
    """The negative control of the test above."""
    world, _ = loaded
    assert world.pool.loading is None
    assert world.run(save_kv_cache=False).isnan().any()


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_reading_raises_the_error_of_a_failed_load_until_it_is_replaced(kind: str) -> None:
    world = Forward(SHAPES[kind])
    world.pool.loading = FailedTransfer(TransferError("the copy failed"))
    for _ in range(2):
        with pytest.raises(TransferError, match="the copy failed"):
            world.run()
    world.pool.loading = None
    close(world.run(), world.expected())


def test_rows_of_a_request_table_are_read_as_the_cache_writes_them() -> None:
    pool = create_device_pool(SHAPES["mha"].geometry(4), 9)
    rows = RequestToTokenPool(1, 12)
    row, pages = rows.alloc(), np.array([7, 2, 5], np.int32)
    assert row is not None
    rows.write(row, pages, 4)
    batch = AttentionBatch(pool, rows.table, [Queries(row, 3, 7)])
    assert batch.slots.tolist() == token_slots(pages, 4)[3:10].tolist()
    assert list(itertools.chain.from_iterable(g.pages.tolist() for g in batch.groups(None, 1)))[:3] == [7, 2, 5]

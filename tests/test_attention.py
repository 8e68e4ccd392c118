"""RadixAttention compared with a dense reference in float64, over pools whose unused entries are NaN."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.passes.split_module import split_module

from hicache.attention import (
    AttentionBackend,
    AttentionBatch,
    Queries,
    RadixAttention,
    forward_context,
    sdpa,
)
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

T = TypeVar("T")

CONTEXT, LAYERS = 64, 2
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
        return KVGeometry(LAYERS, self.kv_heads, self.head_dim, page_size, dtype, layout, v_head_dim)

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

    `k` and `v` are of all tokens of each request, `new_q`, `new_k` and `new_v` what a layer is given. With `encoders`,
    each request has an encoder of so many tokens, whose KV is in the pool, in `encoder_k` and `encoder_v`.
    """

    def __init__(  # noqa: PLR0913 - what a test varies
        self, shape: Shape, sizes: Sequence[tuple[int, int]] = MIXED, page_size: int = 4, *,
        dtype: str = "float32", compute: torch.dtype = torch.float32, seed: int = 0, window: int | None = None,
        scales: tuple[float | None, float | None] = (None, None), encoders: Sequence[int] = (),
    ) -> None:
        self.shape, self.sizes, self.window, self.compute = shape, sizes, window, compute
        self.scales = scales[:1] if shape.mla else scales
        numbers = self.numbers = torch.Generator().manual_seed(seed)
        pages = sum(-(-tokens // page_size) for tokens in [*map(sum, sizes), *encoders])
        pool = create_device_pool(shape.geometry(page_size, dtype), pages + 3)
        assert isinstance(pool, MHATokenToKVPool | MLATokenToKVPool)
        self.pool = pool
        for layer in pool.kv_buffer:
            layer.fill_(math.nan)
        # Stale slots of another pool.
        self.table = torch.full((len(sizes) + len(encoders) + 1, CONTEXT), 10**6, dtype=torch.int32)
        self.free = torch.randperm(pages, generator=numbers).to(torch.int32) + 1
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        self.slots: list[torch.Tensor] = []
        self.queries: list[Queries] = []
        for row, total in enumerate([*map(sum, sizes), *encoders]):
            self.add(row, total)
        for row, (cached, new) in enumerate(sizes):
            encoder = {"encoder_row": len(sizes) + row, "encoder_tokens": encoders[row]} if encoders else {}
            self.queries.append(Queries(row, cached, new, **encoder))
            self.write(row, slice(cached))
        for row in range(len(sizes), len(sizes) + len(encoders)):
            self.write(row, slice(None))
        self.encoder_k, self.k = self.k[len(sizes) :], self.k[: len(sizes)]
        self.encoder_v, self.v = self.v[len(sizes) :], self.v[: len(sizes)]
        self.new_k, self.new_v = (
            torch.cat([part[cached:] for part, (cached, _) in zip(parts, sizes, strict=True)])
            for parts in (self.k, self.v)
        )
        self.new_q = torch.randn(len(self.new_k), shape.heads, shape.head_dim, generator=numbers).to(compute)

    def add(self, row: int, total: int) -> None:
        """Give a row random KV, in the values that it has when it is read from the pool."""
        page_size, shape = self.pool.geometry.page_size, self.shape
        mine, self.free = self.free[: -(-total // page_size)], self.free[-(-total // page_size) :]
        slots = torch.from_numpy(token_slots(mine.numpy(), page_size))[:total]
        self.table[row, :total] = slots.to(torch.int32)
        self.slots.append(slots)
        k, v = (
            torch.randn(total, shape.kv_heads, dim, generator=self.numbers).to(self.pool.dtype).to(self.compute)
            for dim in (shape.head_dim, shape.v_head_dim)
        )
        k, v = (part * (scale or 1.0) for part, scale in zip((k, v), (*self.scales, None), strict=False))
        self.k.append(k)
        self.v.append(k[..., : shape.v_head_dim] if shape.mla else v)

    def write(self, row: int, tokens: slice, layer: int = 1) -> None:
        parts = [part[row][tokens] for part in (self.k, self.v)][: len(self.scales)]
        self.pool.set_kv_buffer(layer, self.slots[row][tokens], *parts, *self.scales)

    def batch(self, backend: AttentionBackend | None = None) -> AttentionBatch:
        return AttentionBatch(self.pool, self.table, self.queries, backend)

    def layer(self, layer: int = 1, **options: Any) -> RadixAttention:
        scales = dict(zip(("k_scale", "v_scale"), self.scales, strict=False))
        return self.shape.attention(layer, **{"sliding_window": self.window, **scales, **options})

    def run(
        self, *, save_kv_cache: bool = True, given: bool = True, backend: AttentionBackend | None = None, **options: Any
    ) -> torch.Tensor:
        v = None if self.shape.mla else self.new_v
        k, v = (self.new_k, v) if given and not options.get("is_cross_attention") else (None, None)
        result: torch.Tensor = self.layer(**options)(self.new_q, k, v, self.batch(backend), save_kv_cache)
        return result

    def expected(
        self, *, scale: float | None = None, logit_cap: float | None = None, is_cross_attention: bool = False
    ) -> torch.Tensor:
        """Return the expected result, one query at a time, `[tokens, heads * v_head_dim]`."""
        scale, rows = self.shape.head_dim**-0.5 if scale is None else scale, []
        queries = iter(self.new_q.double())
        all_k, all_v = (self.encoder_k, self.encoder_v) if is_cross_attention else (self.k, self.v)
        for (cached, new), k, v in zip(self.sizes, all_k, all_v, strict=True):
            for position in range(cached, cached + new):
                first = 0 if self.window is None else max(0, position - self.window + 1)
                seen = slice(None) if is_cross_attention else slice(first, position + 1)
                rows.append(attended(next(queries), k[seen], v[seen], scale, logit_cap))
        return torch.stack(rows)


def attended(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, logit_cap: float | None
) -> torch.Tensor:
    """Return what one query `[heads, head_dim]` in float64 sees in `[keys, kv_heads, dim]`, one head at a time."""
    heads, sharing = [], len(query) // k.shape[1]
    for head, one in enumerate(query):
        logits = (k[:, head // sharing].double() @ one) * scale
        if logit_cap is not None:
            logits = (logits / logit_cap).tanh() * logit_cap
        heads.append(torch.softmax(logits, 0) @ v[:, head // sharing].double())
    return torch.cat(heads)


class NaiveBackend:
    """Attention in float64, one query at a time, over the pages of each request. It knows only public names."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: RadixAttention,
        batch: AttentionBatch, save_kv_cache: bool,
    ) -> torch.Tensor:
        pool, number, scales = batch.pool, layer.layer, [layer.k_scale, layer.v_scale]
        assert save_kv_cache and layer.pos_encoding_mode == "NONE"
        if isinstance(pool, MLATokenToKVPool):
            if k is not None:
                pool.set_kv_buffer(number, batch.slots, k, layer.k_scale)
            k_cache, scales = pool.get_kv_buffer(number), [layer.k_scale] * 2
            v_cache = k_cache[..., : layer.v_head_dim]
        else:
            if k is not None and v is not None:
                pool.set_kv_buffer(number, batch.slots, k, v, layer.k_scale, layer.v_scale)
            k_cache, v_cache = pool.get_kv_buffer(number)
        keys, rows = batch.paged_keys(encoder=layer.is_cross_attention), []
        for index, length in enumerate(keys.lengths):
            pages = keys.pages[keys.page_indptr[index] : keys.page_indptr[index + 1]]
            assert (len(pages) - 1) * pool.geometry.page_size + keys.last_page_tokens[index] == length
            read_k, read_v = (
                cache[pages].flatten(0, 1)[:length].to(q.dtype) * (1.0 if scale is None else scale)
                for cache, scale in zip((k_cache, v_cache), scales, strict=True)
            )
            for token in range(int(keys.query_indptr[index]), int(keys.query_indptr[index + 1])):
                end = int(length) if layer.is_cross_attention else int(batch.positions[token]) + 1
                first = 0 if layer.sliding_window is None else max(0, end - layer.sliding_window)
                seen = slice(first, end)
                rows.append(attended(q[token].double(), read_k[seen], read_v[seen], layer.scale, layer.logit_cap))
        return torch.stack(rows).to(q.dtype)


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


@pytest.mark.parametrize("seed", seeds(10))
def test_random_batches_equal_dense_attention_and_a_backend_that_reads_pages(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = rng(seed)
    monkeypatch.setattr(sdpa, "ROWS_MAX", numbers.choice([1, 6, 16, 2048]))  # cuts prefills and splits groups
    monkeypatch.setattr(sdpa, "KEYS_MAX", numbers.choice([1, 64, 1 << 16]))
    sizes = [(numbers.choice([0, 0, 3, 8, 30]), numbers.choice([1, 1, 2, 9, 25])) for _ in range(numbers.randint(1, 9))]
    cross = numbers.random() < 0.4
    window = None if cross else numbers.choice([None, 3, 12])
    world = Forward(
        SHAPES[numbers.choice(list(SHAPES))], sizes, numbers.choice([1, 2, 4, 16]), window=window, seed=seed,
        dtype=numbers.choice(["float32", "float8_e4m3fn"]), scales=numbers.choice([(None, None), (0.25, 3.0)]),
        encoders=[numbers.choice([1, 5, 16, 33]) for _ in sizes] if cross else [],
    )
    options: dict[str, Any] = {"logit_cap": numbers.choice([None, 2.0]), "is_cross_attention": cross}
    close(world.run(**options, save_kv_cache=numbers.random() < 0.5), world.expected(**options))
    close(world.run(**options, backend=NaiveBackend()), world.expected(**options))


@pytest.mark.parametrize("change", ["scale", "logit_cap", "window"])
def test_each_option_changes_the_result(change: str) -> None:
    """The negative control: the comparison detects an ignored option."""
    world = Forward(SHAPES["gqa"], window=5)
    result = world.run(scale=0.3, logit_cap=1.5)
    close(result, world.expected(scale=0.3, logit_cap=1.5))
    if change == "window":
        world.window = 6
    options: dict[str, Any] = {"scale": 0.3, "logit_cap": 1.5} | ({change: 2.0} if change != "window" else {})
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


def groups(world: Forward) -> list[sdpa._Group]:
    return sdpa._groups(world.batch(), None, 3, cross=False)


def test_decodes_are_one_product_without_padding_to_the_longest_request() -> None:
    shape = SHAPES["gqa"]
    world = Forward(shape, [(20, 1), (30, 1), (25, 1), (19, 1)])
    assert [len(group.blocks) for group in groups(world)] == [4]
    world = Forward(shape, [(1, 1), (2, 1), (62, 1), (3, 1)])
    assert sorted((len(group.blocks), group.keys) for group in groups(world)) == [(1, 64), (3, 16)]


class Counting(AttentionBatch):
    """A batch that counts what its backend makes."""

    made = 0

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        def count() -> T:
            self.made += 1
            return make()

        return super().once(key, count)


def test_a_batch_is_cut_once_for_all_layers_with_the_same_window() -> None:
    world = Forward(SHAPES["gqa"])
    batch = Counting(world.pool, world.table, world.queries)
    for options, made in (({}, 1), ({"logit_cap": 2.0}, 1), ({"sliding_window": 3}, 2)):
        for layer in range(LAYERS):
            world.layer(layer, **options)(world.new_q, world.new_k, world.new_v, batch)
            assert batch.made == made
    assert batch.paged_keys() is batch.paged_keys() and batch.made == 3


def test_keys_of_a_product_and_the_memory_of_a_batch_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "KEYS_MAX", 128)
    decodes = groups(Forward(SHAPES["gqa"], [(40, 1)] * 9))
    assert [(len(group.blocks), group.keys) for group in decodes] == [(2, 48)] * 4 + [(1, 48)]
    prefill = groups(Forward(SHAPES["gqa"], [(0, 60)]))
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
        assert len(batch.paged_keys().pages) == sum(-(-sum(size) // 4) for size in world.sizes)
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
                Queries(0, 0, 4, -1), Queries(0, 0, 1, encoder_row=2), Queries(0, 0, 1, encoder_tokens=65)):
        with pytest.raises(InvalidInput, match="queries"):
            AttentionBatch(pool, table, [bad])
    with pytest.raises(InvalidInput, match="queries is empty"):
        AttentionBatch(pool, table, [])
    for other in (KVPool(pool.geometry, pool.blocks), create_device_pool(shape.geometry(4, "int8"), 2)):
        with pytest.raises(InvalidInput, match="floating-point"):
            AttentionBatch(other, table, world.queries)
    for wrong in ({"heads": 5}, {"heads": 0}, {"layer": -1}, {"scale": 0.0}, {"logit_cap": -1.0}, {"logit_cap": 0.0},
                  {"sliding_window": 0}, {"v_head_dim": 0}, {"k_scale": 0.0}, {"v_scale": math.inf},
                  {"is_cross_attention": 1}, {"pos_encoding_mode": None},
                  {"is_cross_attention": True, "sliding_window": 4}):
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
    with pytest.raises(InvalidInput, match="write the encoder's KV"):
        shape.attention(is_cross_attention=True)(q, k, v, batch)
    with pytest.raises(InvalidInput, match="encoder_tokens of row 0 is 0"):
        shape.attention(is_cross_attention=True)(q, None, None, batch)
    with pytest.raises(InvalidInput, match="SdpaBackend has no position encoding 'ROPE_LLAMA'"):
        shape.attention(pos_encoding_mode="ROPE_LLAMA")(q, k, v, batch)
    assert torch.equal(pool.kv_buffer[1].view(torch.uint8), before)
    mla = Forward(SHAPES["mla"], [(4, 2)])
    with pytest.raises(InvalidInput, match="v_scale with an MLA pool"):
        mla.run(v_scale=2.0)


# Backends


class Recorded(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    layer: RadixAttention
    batch: AttentionBatch
    save_kv_cache: bool


class RecordingBackend:
    """A backend that keeps its calls and returns the queries as `[tokens, heads, v_head_dim]`."""

    def __init__(self) -> None:
        self.calls: list[Recorded] = []

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: RadixAttention,
        batch: AttentionBatch, save_kv_cache: bool,
    ) -> torch.Tensor:
        self.calls.append(Recorded(q, k, v, layer, batch, save_kv_cache))
        return q[..., : layer.v_head_dim]


@pytest.mark.parametrize("kind", ["gqa", "wide-k", "mla"])
def test_a_backend_gets_all_that_the_module_knows_in_one_shape(kind: str) -> None:
    shape, backend = SHAPES[kind], RecordingBackend()
    world = Forward(shape)
    batch, v = world.batch(backend), None if shape.mla else world.new_v
    numbers: dict[str, Any] = {
        "scale": 0.5, "logit_cap": 3.0, "sliding_window": 7, "pos_encoding_mode": "ALIBI", "k_scale": 2.0,
        "v_scale": None if shape.mla else 4.0,
    }
    layer = shape.attention(**numbers)
    flat = (None if part is None else part.flatten(1) for part in (world.new_q, world.new_k, v))
    result = layer(*flat, batch, False)
    q, k, v_given, *rest = backend.calls[0]
    assert torch.equal(q, world.new_q) and k is not None and torch.equal(k, world.new_k)
    assert v_given is None if v is None else v_given is not None and torch.equal(v_given, v)
    assert rest == [layer, batch, False]
    assert {name: getattr(layer, name) for name in numbers} == numbers
    assert (layer.heads, layer.kv_heads, layer.head_dim, layer.v_head_dim, layer.layer) == (
        shape.heads, shape.kv_heads, shape.head_dim, shape.v_head_dim, 1)
    assert torch.equal(result, world.new_q[..., : shape.v_head_dim].flatten(1))
    shape.attention(is_cross_attention=True)(world.new_q, None, None, batch)
    assert backend.calls[1].layer.is_cross_attention and backend.calls[1].k is None and backend.calls[1].save_kv_cache
    with pytest.raises(InvalidInput, match="are needed"):
        layer(world.new_q[:3], None, None, batch)
    assert len(backend.calls) == 2, "a backend gets only tensors that fit"


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_pages_of_the_keys_are_in_the_form_of_paged_kernels(page_size: int) -> None:
    world = Forward(SHAPES["gqa"], [(5, 3), (8, 1)], page_size, encoders=[9, 4])
    keys = world.batch().paged_keys()
    assert all(part.dtype is torch.int32 for part in keys)
    assert keys.query_indptr.tolist() == [0, 3, 4] and keys.lengths.tolist() == [8, 9]
    assert keys.page_indptr.tolist() == ([0, 8, 17] if page_size == 1 else [0, 2, 5])
    assert keys.last_page_tokens.tolist() == ([1, 1] if page_size == 1 else [4, 1])
    assert keys.pages.tolist() == torch.cat([slots[::page_size] // page_size for slots in world.slots[:2]]).tolist()
    keys = world.batch().paged_keys(encoder=True)
    assert keys.query_indptr.tolist() == [0, 3, 4] and keys.lengths.tolist() == [9, 4]
    assert keys.pages.tolist() == torch.cat([slots[::page_size] // page_size for slots in world.slots[2:]]).tolist()


def test_pages_of_padding_behind_the_queries_are_the_padding_page() -> None:
    world = Forward(SHAPES["gqa"], [(5, 3)])
    world.queries = [Queries(0, 4, 9, before=1, behind=5)]  # positions 4 .. 12, of which 5 .. 7 are computed
    batch = world.batch()
    keys = batch.paged_keys()
    assert keys.lengths.tolist() == [13] and batch.positions.tolist() == list(range(4, 13))
    assert keys.pages.tolist() == [*(world.slots[0][::4] // 4).tolist(), 0, 0]


@pytest.mark.parametrize("kind", ["gqa", "wide-v", "mla"])
@pytest.mark.parametrize(("dtype", "compute"), [("float8_e4m3fn", torch.bfloat16), ("bfloat16", torch.float32)])
def test_kv_is_stored_divided_by_its_scale_and_read_multiplied_by_it(
    kind: str, dtype: str, compute: torch.dtype
) -> None:
    world = Forward(SHAPES[kind], dtype=dtype, compute=compute, scales=(1.5, 3.0))
    unsaved, result = world.run(save_kv_cache=False), world.run()
    assert torch.equal(result, unsaved)
    close(result, world.expected(), 3e-2 if compute is torch.bfloat16 else 1e-5)
    raw = Forward(SHAPES[kind], dtype=dtype, compute=compute)  # the same seed: values of the pool, without scales
    raw.run()
    for found, expected in zip(world.pool.kv_buffer[1], raw.pool.kv_buffer[1], strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    without: list[dict[str, Any]] = [{"k_scale": None}, {"v_scale": None}][: len(world.scales)]
    assert not any(torch.equal(world.run(given=False, **options), result) for options in without), "the control"


@pytest.mark.parametrize("kind", SHAPES)
def test_cross_attention_sees_all_keys_of_the_encoder_and_no_others(kind: str) -> None:
    sizes, encoders = [(0, 7), (5, 1), (20, 1), (3, 20)], [33, 1, 16, 3]  # also fewer keys than queries
    world = Forward(SHAPES[kind], sizes, encoders=encoders)
    expected = world.expected(is_cross_attention=True)
    close(world.run(is_cross_attention=True), expected)
    close(world.run(), world.expected())  # layers without it use the same batch
    world.encoder_k[2][15] *= 2  # the last key of an encoder
    with pytest.raises(AssertionError):
        close(world.run(is_cross_attention=True), world.expected(is_cross_attention=True))


# Compiled code


class Stack(torch.nn.Module):
    """Layers of attention between products, as a model has them."""

    def __init__(self, world: Forward) -> None:
        super().__init__()
        shape = world.shape
        numbers = torch.Generator().manual_seed(5)
        sizes = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.v_head_dim]
        self.sizes = sizes[:2] if shape.mla else sizes
        self.enter = torch.nn.ParameterList(torch.randn(32, sum(self.sizes), generator=numbers) for _ in range(LAYERS))
        self.leave = torch.nn.ParameterList(
            torch.randn(shape.heads * shape.v_head_dim, 32, generator=numbers) / 9 for _ in range(LAYERS)
        )
        self.attention = [world.layer(number) for number in range(LAYERS)]

    def forward(self, state: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        for enter, attention, leave in zip(self.enter, self.attention, self.leave, strict=True):
            q, k, *v = (state @ enter).split(self.sizes, 1)
            state = torch.tanh(state + attention(q, k, v[0] if v else None, batch) @ leave)
        return state


def is_attention(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.hicache.attention.default


class Splitter:
    """A backend of `torch.compile` that cuts a graph at attention, as piecewise CUDA graphs do, and runs the pieces."""

    def __init__(self) -> None:
        self.graphs = 0
        self.pieces: list[str] = []
        self.operations = 0

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        self.graphs += 1
        piece, pieces = 0, {}
        for node in graph.graph.nodes:
            cut = is_attention(node)
            self.operations += cut
            piece += cut
            pieces[node] = piece
            piece += cut
        # In order, because the graph does not show that the rest reads what the operation has written.
        split = split_module(graph, graph, pieces.__getitem__, keep_original_order=True)
        self.pieces = [
            "attention" if any(map(is_attention, part.graph.nodes)) else "rest"
            for part in split.children() if isinstance(part, torch.fx.GraphModule)
        ]
        return split


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("kind", ["gqa", "wide-k", "mla"])
@torch.inference_mode()
def test_compiled_attention_is_one_operation_per_layer_and_splits_the_graph_there(kind: str) -> None:
    splitter, state = Splitter(), torch.randn(40, 32, generator=torch.Generator().manual_seed(6))
    world, eager = (Forward(SHAPES[kind]) for _ in range(2))
    model, tokens = Stack(world), len(world.new_q)
    for some in (world, eager):
        for row, (cached, _) in enumerate(some.sizes):
            some.write(row, slice(cached), layer=0)
    compiled = torch.compile(model, backend=splitter, fullgraph=True)
    expected = model(state[:tokens], eager.batch())
    for _ in range(2):  # another batch does not compile again
        batch = world.batch()
        with forward_context(batch, model.attention):
            assert torch.equal(compiled(state[:tokens], batch), expected)
    assert splitter.graphs == 1 and splitter.operations == LAYERS
    assert splitter.pieces == ["rest", "attention"] * LAYERS + ["rest"]
    for mine, other in zip(world.pool.kv_buffer, eager.pool.kv_buffer, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.usefixtures("_fresh_compiler")
@torch.inference_mode()
def test_compiled_attention_with_functional_graphs_and_rows_of_padding() -> None:
    world = Forward(SHAPES["gqa"])
    for row, (cached, _) in enumerate(world.sizes):
        world.write(row, slice(cached), layer=0)
    model, tokens = Stack(world), len(world.new_q)
    state = torch.randn(tokens + 6, 32, generator=torch.Generator().manual_seed(6))
    expected = model(state[:tokens], world.batch())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with forward_context(world.batch(), model.attention):
        result = compiled(state, world.batch())
    torch.testing.assert_close(result[:tokens], expected)
    torch.testing.assert_close(result[tokens:], torch.tanh(torch.tanh(state[tokens:])))


@torch.inference_mode()
def test_the_operation_needs_its_context_and_each_thread_has_its_own() -> None:
    world = Forward(SHAPES["gqa"])
    layer, batch = world.layer(), world.batch()
    # Three rows more than the batch has tokens.
    q, k, v = (torch.cat((part, part[:3])) for part in (world.new_q, world.new_k, world.new_v))

    def attend(number: int = 1) -> torch.Tensor:
        output = torch.full((len(q), 6 * 16), math.nan)
        torch.ops.hicache.attention(q, k, v, output, number, True)
        assert not output[-3:].any()
        return output[:-3]

    with pytest.raises(InvalidInput, match="run it in a `forward_context`"):
        attend()
    with forward_context(batch, [layer]):
        close(attend(), world.expected())
        with ThreadPoolExecutor(1) as threads, pytest.raises(InvalidInput, match="forward_context"):
            threads.submit(attend).result()
        with pytest.raises(InvalidInput, match="compiled code of layer 0"):
            attend(0)
        with forward_context(batch, [world.layer(0)]), pytest.raises(InvalidInput, match="compiled code of layer 1"):
            attend()
        close(attend(), world.expected())  # the outer context again
    with pytest.raises(InvalidInput, match="forward_context"):
        attend()
    with pytest.raises(InvalidInput, match="2 layers have 1 numbers"), forward_context(batch, [layer, world.layer()]):
        pass


@torch.inference_mode()
def test_the_operation_has_the_properties_that_compilers_rely_on() -> None:
    world = Forward(SHAPES["gqa"])
    with forward_context(world.batch(), [world.layer()]):
        torch.library.opcheck(
            torch.ops.hicache.attention.default,
            (world.new_q, world.new_k, world.new_v, torch.empty(len(world.new_q), 6 * 16), 1, True),
        )


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
    taken, pages = rows.alloc(1), np.array([7, 2, 5], np.int32)
    assert taken is not None
    (row,) = taken
    rows.write(row, pages, 4)
    batch = AttentionBatch(pool, rows.table, [Queries(row, 3, 7)])
    assert batch.slots.tolist() == token_slots(pages, 4)[3:10].tolist()
    cut = sdpa._groups(batch, None, 1, cross=False)
    assert list(itertools.chain.from_iterable(group.pages.tolist() for group in cut))[:3] == [7, 2, 5]

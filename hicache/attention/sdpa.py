"""SDPA as a backend of attention: keys are gathered from their pages, and PyTorch computes the product.

Algorithm. The queries are cut into blocks. Blocks with the same number of queries and about the same number of keys
form a group: their K and V are gathered page by page into `[blocks, keys]`, entries without a key become zeros, and one
product with a mask computes the result. Query heads that share a KV head are rows of one product, so KV is never
repeated. The product is PyTorch's `scaled_dot_product_attention`. With a logit cap, which that function does not
support, it is computed step by step.

The shapes are computed from numbers on the host, so no call waits for the device. The shapes and the mask of a batch
with a single block depend only on `start` and `count`; the reference engine relies on that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import InvalidInput
from ..tiers.device import pool_values
from ..tiers.upload import upload
from .radix_attention import AttentionBatch, RadixAttention

# Rows of one product: queries times the query heads that share a KV head. The mask has rows times keys entries, 256 MiB
# with 128 Ki keys, and is made again for each layer: all masks of a long prefill would take many times as much memory.
ROWS_MAX = 2048
# Keys gathered for one product, unless a single block has more: requests that share a prefix get separate copies of it.
# With 8 heads of 128 in bfloat16, K and V of this many keys take 256 MiB.
KEYS_MAX = 1 << 16
# Kernels on CUDA copy a mask whose rows are not a multiple of 16 bytes, in each layer.
KEYS_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries that are computed together, and the positions of their keys, `begin` .. `end - 1`."""

    row: int
    start: int
    count: int
    token: int  # index of the first query in the batch
    begin: int  # a multiple of the page size
    end: int
    step: int  # from a query to the position of the next one: 1, or 0 in cross-attention, where all see the same keys
    new: int  # position of the first key that this forward computes,
    new_token: int  # and its index in the batch

    @property
    def keys(self) -> int:
        return -(-(self.start + 1 + (self.count - 1) * self.step - self.begin) // KEYS_MULTIPLE) * KEYS_MULTIPLE


class _Group(NamedTuple):
    """Blocks of one product, and the tensors for it."""

    blocks: Sequence[_Block]
    keys: int
    shortest: int  # from this key on, some of the blocks do not have keys
    tokens: torch.Tensor  # int64 [blocks * queries], indices in the batch
    pages: torch.Tensor  # int64 [blocks * pages], the padding page if a block does not have a page
    missing: torch.Tensor  # bool [blocks, keys - shortest, 1, 1]
    begin: torch.Tensor  # int64 [blocks, 1, 1], position of the first key
    queries: torch.Tensor  # int64 [blocks, queries, 1], positions of the queries, which are those of the last keys

    def visible(self, window: int | None, sharing: int) -> torch.Tensor:
        """Return the mask, bool `[blocks, 1, rows, keys]`."""
        positions = self.begin + torch.arange(self.keys, device=self.begin.device)
        visible = positions <= self.queries
        if window is not None:
            visible &= positions > self.queries - window
        return visible.repeat(1, sharing, 1)[:, None]


class SdpaBackend:
    """Attention with PyTorch, for any heads, dtypes and devices. Each call copies the KV that it reads.

    KV is read in the dtype of `q` and multiplied by its scale. Without `save_kv_cache` the result is the same, because
    a token's KV is rounded as in the pool. REQUIRES: called without gradients, as in `torch.inference_mode()`. Raises
    InvalidInput for a position encoding, and for queries without an encoder in cross-attention.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: RadixAttention,
        batch: AttentionBatch, save_kv_cache: bool,
    ) -> torch.Tensor:
        """Return `[tokens, heads * v_head_dim]`. See `AttentionBackend`."""
        if layer.pos_encoding_mode != "NONE":
            raise InvalidInput(
                f"attention: SdpaBackend has no position encoding {layer.pos_encoding_mode[:40]!r}; encode Q and K in "
                "the model, or use a backend that has it"
            )
        shape = layer.sliding_window, layer.heads // layer.kv_heads, layer.is_cross_attention
        groups = batch.once(("sdpa", *shape), lambda: _groups(batch, *shape))
        pool, scales, new = batch.pool, (layer.k_scale, layer.v_scale), [part for part in (k, v) if part is not None]
        if not save_kv_cache:
            new = [pool_values(part, scale, pool.dtype) for part, scale in zip(new, scales, strict=False)]
        elif new:
            used = scales[: len(new)]
            pool.set_kv_buffer(layer.layer, batch.slots, *new, *used)
            new = []
        read = pool.get_kv_buffer(layer.layer)
        buffers = [read] if isinstance(read, torch.Tensor) else read
        q = q.reshape(batch.tokens, layer.kv_heads, -1, layer.head_dim)
        output = q.new_empty((batch.tokens, layer.heads * layer.v_head_dim))
        for group in groups:
            parts = [_gather(buffer, group, q.dtype) for buffer in buffers]
            for part, tokens in zip(parts, new, strict=False):
                _place(part, tokens, group)
            for part, scale in zip(parts, scales, strict=False):
                if scale is not None:
                    part.mul_(scale)
            keys, values = parts if len(parts) == 2 else (parts[0], parts[0][..., : layer.v_head_dim])
            output.index_copy_(0, group.tokens, _attend(layer, q, keys, values, group))
        return output


def _groups(batch: AttentionBatch, window: int | None, sharing: int, cross: bool) -> list[_Group]:
    """Return the products of a layer with this sliding window and `sharing` query heads per KV head."""
    alike: dict[tuple[int, int], list[_Block]] = {}
    for block in _cut(batch, window, max(1, ROWS_MAX // sharing), cross):
        # Padding at most doubles the keys of a block.
        alike.setdefault((block.count, block.keys.bit_length()), []).append(block)
    return [
        _group(batch, blocks[first : first + step])
        for (count, _), blocks in alike.items()
        for step in [max(1, min(ROWS_MAX // (sharing * count), KEYS_MAX // max(some.keys for some in blocks)))]
        for first in range(0, len(blocks), step)
    ]


def _cut(batch: AttentionBatch, window: int | None, queries_max: int, cross: bool) -> Iterator[_Block]:
    page_size, token = batch.pool.geometry.page_size, 0
    for some in batch.queries:
        if cross and not some.encoder_tokens:
            raise InvalidInput(f"attention: cross-attention, but encoder_tokens of row {some.row} is 0")
        for done in range(0, some.count, queries_max):
            start, count = some.start + done, min(queries_max, some.count - done)
            if cross:
                end = some.encoder_tokens
                yield _Block(some.encoder_row, end - 1, count, token + done, 0, end, 0, end, 0)
                continue
            begin = 0 if window is None else max(0, start - window + 1) // page_size * page_size
            end = min(start + count, some.start + some.count - some.behind)
            new = some.start + some.before
            yield _Block(some.row, start, count, token + done, begin, end, 1, new, token + some.before)
        token += some.count


def _group(batch: AttentionBatch, blocks: Sequence[_Block]) -> _Group:
    page_size, keys = batch.pool.geometry.page_size, max(block.keys for block in blocks)
    shortest = max(0, min(block.end - block.begin for block in blocks))
    numbers = np.array([(b.row, b.start, b.token, b.begin, b.end) for b in blocks], np.int64)
    row, start, token, begin, end = upload(numbers.T, batch.pool.device).unsqueeze(-1)
    steps, each = (torch.arange(count, device=batch.pool.device) for count in (keys, blocks[0].count))
    positions, queries = begin + steps, start + each * blocks[0].step
    columns = positions[:, ::page_size]
    slots = batch.table[row, columns.clamp(max=batch.table.shape[1] - 1)].to(torch.int64)
    return _Group(
        blocks, keys, shortest,
        tokens=(token + each).flatten(),
        pages=torch.where(columns < end, slots // page_size, 0).flatten(),
        missing=(positions >= end)[:, shortest:, None, None],
        begin=begin[:, None],
        queries=queries[:, :, None],
    )


def _attend(
    layer: RadixAttention, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group
) -> torch.Tensor:
    """Compute one product: K and V `[blocks, keys, kv_heads, dim]` to `[blocks * queries, heads * v_head_dim]`."""
    blocks, count, sharing = len(group.blocks), group.blocks[0].count, q.shape[2]
    some = q.index_select(0, group.tokens).view(blocks, count, *q.shape[1:])
    some = some.permute(0, 2, 3, 1, 4).reshape(blocks, layer.kv_heads, sharing * count, layer.head_dim)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    visible = group.visible(layer.sliding_window, sharing)
    if layer.logit_cap is None:
        mixed = F.scaled_dot_product_attention(some, keys, values, attn_mask=visible, scale=layer.scale)
    else:
        # The cap needs more precision than logits of 16 bits have.
        wide = torch.promote_types(q.dtype, torch.float32)
        logits = torch.matmul(some.to(wide) * (layer.scale / layer.logit_cap), keys.to(wide).transpose(2, 3))
        logits.tanh_().mul_(layer.logit_cap).masked_fill_(~visible, -math.inf)
        mixed = torch.matmul(torch.softmax(logits, dim=-1).to(values.dtype), values)
    mixed = mixed.view(blocks, layer.kv_heads, sharing, count, layer.v_head_dim).permute(0, 3, 1, 2, 4)
    return mixed.reshape(blocks * count, layer.heads * layer.v_head_dim)


def _gather(buffer: torch.Tensor, group: _Group, dtype: torch.dtype) -> torch.Tensor:
    """Gather `[pages, page_size, heads, dim]` of a pool into `[blocks, keys, heads, dim]`; missing keys are zeros."""
    pages = buffer.index_select(0, group.pages)
    found = pages.view(len(group.blocks), -1, *buffer.shape[2:])[:, : group.keys].to(dtype)
    if group.shortest < group.keys:
        # Slots of a page without a token have arbitrary content. A weight of 0 would not remove NaN.
        found[:, group.shortest :].masked_fill_(group.missing, 0)
    return found


def _place(gathered: torch.Tensor, tokens: torch.Tensor, group: _Group) -> None:
    """Write the keys that are not in the pool, `[tokens, heads, dim]`, to the positions at which they are read."""
    for found, block in zip(gathered, group.blocks, strict=True):
        first = max(block.new, block.begin)
        if first < block.end:
            from_token = block.new_token + first - block.new
            found[first - block.begin : block.end - block.begin] = tokens[from_token : from_token + block.end - first]

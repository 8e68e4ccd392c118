"""RadixAttention: attention over the paged KV of L1, one per layer of a model.

It has the name of SGLang's class (Zheng et al., 2024) and does not use the tree. It writes the KV of new tokens to a
pool, reads the KV of all tokens through a page table, and computes the product with PyTorch. A forward needs no other
call of HiCache, because reading a layer waits for the load of that layer:

    batch = AttentionBatch(cache.device, rows.table, [Queries(row, cached_tokens, new_tokens), ...])   # once
    attended = attention[layer](q, k, v, batch)                                                        # in each layer

A batch may mix prefills, prefills after a cached prefix, and decodes. The shapes are computed from numbers on the host,
so no call waits for the device.

Algorithm. The queries are cut into blocks. Blocks with the same number of queries and about the same number of keys
form a group: their K and V are gathered page by page into `[blocks, keys]`, entries without a key become zeros, and one
product with a mask computes the result. Query heads that share a KV head are rows of one product, so KV is never
repeated. The product is PyTorch's `scaled_dot_product_attention`. With a logit cap, which that function does not
support, it is computed step by step.

The shapes and the mask of a batch with a single block depend only on `start` and `count`; `model` relies on that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from .arguments import number, whole
from .errors import InvalidInput
from .tiers import KVPool, MHATokenToKVPool, MLATokenToKVPool
from .tiers.upload import upload

# Rows of one product: queries times the query heads that share a KV head. The mask has rows times keys entries, 256 MiB
# with 128 Ki keys, and is made again for each layer: all masks of a long prefill would take many times as much memory.
ROWS_MAX = 2048
# Keys gathered for one product, unless a single block has more: requests that share a prefix get separate copies of it.
# With 8 heads of 128 in bfloat16, K and V of this many keys take 256 MiB.
KEYS_MAX = 1 << 16
# Kernels on CUDA copy a mask whose rows are not a multiple of 16 bytes, in each layer.
KEYS_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Queries:
    """Consecutive tokens of one request to compute: `count` from position `start` on of row `row` of the page table.

    The first `before` and the last `behind` of them are padding, for a model with fixed shapes: their K and V are
    written to the padding page, and their results are undefined.

    REQUIRES: the KV of all positions before the first computed one is in the pool, or arrives with the load in flight.
    """

    row: int
    start: int
    count: int
    before: int = 0
    behind: int = 0


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries that are computed together, and the positions of their keys, `begin` .. `end - 1`."""

    row: int
    start: int
    count: int
    token: int  # index of the first query in the batch
    begin: int  # a multiple of the page size
    end: int
    new: int  # position of the first key that this forward computes,
    new_token: int  # and its index in the batch

    @property
    def keys(self) -> int:
        return -(-(self.start + self.count - self.begin) // KEYS_MULTIPLE) * KEYS_MULTIPLE


class _Group(NamedTuple):
    """Blocks of one product, and the tensors for it."""

    blocks: Sequence[_Block]
    keys: int
    shortest: int  # from this key on, some of the blocks do not have keys
    tokens: torch.Tensor  # int64 [blocks * queries], indices in the batch
    pages: torch.Tensor  # int64 [blocks * pages], the padding page if a block does not have a page
    missing: torch.Tensor  # bool [blocks, keys - shortest, 1, 1]
    begin: torch.Tensor  # int64 [blocks, 1, 1], position of the first key
    queries: torch.Tensor  # int64 [blocks, queries, 1], positions of the queries

    def visible(self, window: int | None, sharing: int) -> torch.Tensor:
        """Return the mask, bool `[blocks, 1, rows, keys]`."""
        positions = self.begin + torch.arange(self.keys, device=self.begin.device)
        visible = positions <= self.queries
        if window is not None:
            visible &= positions > self.queries - window
        return visible.repeat(1, sharing, 1)[:, None]


class AttentionBatch:
    """The requests of one forward, for all of its layers. Its tokens are those of all `queries`, in order.

    `table` is `[requests, context]`, integers on the pool's device: row r, column t is the slot of token t, and the
    columns of a page are slots of one page, as in `RequestToTokenPool`. The KV of the batch is written at `slots`,
    int64 `[tokens]`. All tensors are made on the device's current stream, without waiting for the device.

    REQUIRES: no two `queries` have the same row. Raises InvalidInput for a pool that is not an attention pool or holds
    integers, for empty queries, and for queries outside the table.
    """

    def __init__(self, pool: KVPool, table: torch.Tensor, queries: Sequence[Queries]) -> None:
        if not isinstance(pool, MHATokenToKVPool | MLATokenToKVPool) or not pool.dtype.is_floating_point:
            raise InvalidInput(f"attention: a {type(pool).__name__}; pass an MHA or MLA pool of floating-point numbers")
        if not queries:
            raise InvalidInput("attention: queries is empty; a batch needs at least one")
        for some in queries:
            _require_place(some, *table.shape)
        self.pool = pool
        self.table = table
        self.queries = queries
        self.tokens = sum(some.count for some in queries)
        self._groups: dict[tuple[int | None, int], list[_Group]] = {}
        places = np.empty((3, self.tokens), np.int64)
        token = 0
        for some in queries:
            here = places[:, token : token + some.count]
            here[0], here[1], here[2] = some.row, np.arange(some.start, some.start + some.count), 0
            here[2, some.before : some.count - some.behind] = 1
            token += some.count
        rows, positions, computed = upload(places, pool.device)
        self.slots = table[rows, positions].to(torch.int64) * computed

    def groups(self, window: int | None, sharing: int) -> list[_Group]:
        """Return the products of a layer with this sliding window and `sharing` query heads per KV head.

        They are made once for all layers with the same arguments.
        """
        key = (window, sharing)
        if key not in self._groups:
            alike: dict[tuple[int, int], list[_Block]] = {}
            for block in self._cut(window, max(1, ROWS_MAX // sharing)):
                # Padding at most doubles the keys of a block.
                alike.setdefault((block.count, block.keys.bit_length()), []).append(block)
            self._groups[key] = [
                self._group(blocks[first : first + step])
                for (count, _), blocks in alike.items()
                for step in [max(1, min(ROWS_MAX // (sharing * count), KEYS_MAX // max(some.keys for some in blocks)))]
                for first in range(0, len(blocks), step)
            ]
        return self._groups[key]

    def _cut(self, window: int | None, queries_max: int) -> Iterator[_Block]:
        page_size, token = self.pool.geometry.page_size, 0
        for some in self.queries:
            for done in range(0, some.count, queries_max):
                start, count = some.start + done, min(queries_max, some.count - done)
                begin = 0 if window is None else max(0, start - window + 1) // page_size * page_size
                end = min(start + count, some.start + some.count - some.behind)
                new = some.start + some.before
                yield _Block(some.row, start, count, token + done, begin, end, new, token + some.before)
            token += some.count

    def _group(self, blocks: Sequence[_Block]) -> _Group:
        page_size, keys = self.pool.geometry.page_size, max(block.keys for block in blocks)
        shortest = max(0, min(block.end - block.begin for block in blocks))
        numbers = np.array([(b.row, b.start, b.token, b.begin, b.end) for b in blocks], np.int64)
        row, start, token, begin, end = upload(numbers.T, self.pool.device).unsqueeze(-1)
        steps = torch.arange(keys, device=self.pool.device)
        positions, queries = begin + steps, start + steps[: blocks[0].count]
        columns = positions[:, ::page_size]
        slots = self.table[row, columns.clamp(max=self.table.shape[1] - 1)].to(torch.int64)
        return _Group(
            blocks, keys, shortest,
            tokens=(token + steps[: blocks[0].count]).flatten(),
            pages=torch.where(columns < end, slots // page_size, 0).flatten(),
            missing=(positions >= end)[:, shortest:, None, None],
            begin=begin[:, None],
            queries=queries[:, :, None],
        )


class RadixAttention(torch.nn.Module):
    """Causal attention of one layer over the paged KV of a pool. It does not have weights or state.

    `heads` query heads of `head_dim` share `kv_heads` KV heads. `layer` is the layer's number in the pool. `scale`
    multiplies the logits, 1 / sqrt(head_dim) by default; `logit_cap` c replaces them by c * tanh(logit / c). With a
    `sliding_window` of n, a query sees n keys, including its own. `v_head_dim` is the size of a V head, by default that
    of a K head. With an MLA pool, K is the latent (`head_dim` is its size, `kv_heads` 1) and V its first `v_head_dim`
    columns, as in the absorbed form.

    REQUIRES: called without gradients, as in `torch.inference_mode()`. Raises InvalidInput for a number out of range.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        kv_heads: int,
        layer: int,
        *,
        scale: float | None = None,
        v_head_dim: int | None = None,
        logit_cap: float | None = None,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = whole("attention: heads", heads, 1), whole("attention: head_dim", head_dim, 1)
        self.kv_heads, self.layer = whole("attention: kv_heads", kv_heads, 1), whole("attention: layer", layer)
        if self.heads % self.kv_heads:
            raise InvalidInput(f"attention: {heads} query heads cannot share {kv_heads} heads of KV; use a divisor")
        self.v_head_dim = head_dim if v_head_dim is None else whole("attention: v_head_dim", v_head_dim, 1)
        self.scale = 1.0 / math.sqrt(head_dim) if scale is None else number("attention: scale", scale, positive=True)
        self.logit_cap = None if logit_cap is None else number("attention: logit_cap", logit_cap, positive=True)
        self.sliding_window = None
        if sliding_window is not None:
            self.sliding_window = whole("attention: sliding_window", sliding_window, 1)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: AttentionBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Return `[tokens, heads * v_head_dim]` in the dtype of `q`.

        `q` is `[tokens, heads, head_dim]`, or the same elements in two dimensions. `k` and `v` are the same with
        `kv_heads`; `v` is None with an MLA pool. K and V are written to the pool in its dtype and read back from there,
        so a token's KV is rounded once for all requests. Without `save_kv_cache` the pool is unchanged, and the result
        is the same. With `k` None, the KV of the batch is already in the pool. KV is read in the dtype of `q`; the
        caller applies the scales of a quantised pool.

        Waits for the load in flight like `get_kv_buffer` (on CUDA: on the current stream), and raises TransferError if
        the load failed. Raises InvalidInput for tensors of another shape and for a pool of another shape; then the pool
        is unchanged.
        """
        new = self._new(q, k, v, batch)
        if save_kv_cache and new:
            batch.pool.set_kv_buffer(self.layer, batch.slots, *new)
            new = ()
        found = batch.pool.get_kv_buffer(self.layer)
        buffers = [found] if isinstance(found, torch.Tensor) else found
        q = q.reshape(batch.tokens, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        output = q.new_empty((batch.tokens, self.heads * self.v_head_dim))
        for group in batch.groups(self.sliding_window, self.heads // self.kv_heads):
            parts = [_gather(buffer, group, q.dtype) for buffer in buffers]
            for part, tokens in zip(parts, new, strict=False):
                _place(part, tokens, group)
            keys, values = parts if len(parts) == 2 else (parts[0], parts[0][..., : self.v_head_dim])
            output.index_copy_(0, group.tokens, self._attend(q, keys, values, group))
        return output

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group) -> torch.Tensor:
        """Compute one product: K and V `[blocks, keys, kv_heads, dim]` to `[blocks * queries, heads * v_head_dim]`."""
        blocks, count, sharing = len(group.blocks), group.blocks[0].count, q.shape[2]
        some = q.index_select(0, group.tokens).view(blocks, count, *q.shape[1:])
        some = some.permute(0, 2, 3, 1, 4).reshape(blocks, self.kv_heads, sharing * count, self.head_dim)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        visible = group.visible(self.sliding_window, sharing)
        if self.logit_cap is None:
            mixed = F.scaled_dot_product_attention(some, keys, values, attn_mask=visible, scale=self.scale)
        else:
            # The cap needs more precision than logits of 16 bits have.
            wide = torch.promote_types(q.dtype, torch.float32)
            logits = torch.matmul(some.to(wide) * (self.scale / self.logit_cap), keys.to(wide).transpose(2, 3))
            logits.tanh_().mul_(self.logit_cap).masked_fill_(~visible, -math.inf)
            mixed = torch.matmul(torch.softmax(logits, dim=-1).to(values.dtype), values)
        mixed = mixed.view(blocks, self.kv_heads, sharing, count, self.v_head_dim).permute(0, 3, 1, 2, 4)
        return mixed.reshape(blocks * count, self.heads * self.v_head_dim)

    def _new(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, batch: AttentionBatch
    ) -> tuple[torch.Tensor, ...]:
        """Return K and V, or the latent, in the pool's dtype; empty if they are in the pool. Raises as `forward`
        does."""
        pool, shape, mla = batch.pool, batch.pool.geometry, isinstance(batch.pool, MLATokenToKVPool)
        v_fits = self.v_head_dim <= shape.head_dim if mla else self.v_head_dim == shape.value_dim
        if (shape.heads, shape.head_dim) != (self.kv_heads, self.head_dim) or not v_fits or self.layer >= shape.layers:
            raise InvalidInput(
                f"attention: layer {self.layer}, {self.kv_heads} heads of {self.head_dim} (V: {self.v_head_dim}), but "
                f"the pool has {shape.layers} layers, {shape.heads} heads of {shape.head_dim} (V: {shape.value_dim})"
            )
        if (k is None or mla) is not (v is None):
            raise InvalidInput("attention: pass K and V, or neither; with an MLA pool the latent as K and V as None")
        sizes = {"q": (q, self.heads * self.head_dim), "k": (k, self.kv_heads * self.head_dim),
                 "v": (v, self.kv_heads * self.v_head_dim)}
        for name, (tensor, size) in sizes.items():
            if tensor is not None and (tensor.shape[0], math.prod(tensor.shape[1:])) != (batch.tokens, size):
                raise InvalidInput(
                    f"attention: {name} is {list(tensor.shape)}; {batch.tokens} tokens of {size} elements are needed"
                )
        return tuple(
            part.reshape(batch.tokens, self.kv_heads, -1).to(pool.dtype) for part in (k, v) if part is not None
        )


def _gather(buffer: torch.Tensor, group: _Group, dtype: torch.dtype) -> torch.Tensor:
    """Gather `[pages, page_size, heads, dim]` of a pool into `[blocks, keys, heads, dim]`, with zeros for missing
    keys."""
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


def _require_place(some: Queries, rows: int, columns: int) -> None:
    if not (0 <= some.row < rows and some.start >= 0 and 0 < some.count <= columns - some.start):
        raise InvalidInput(
            f"attention: {some.count} queries from position {some.start} of row {some.row}; the table has {rows} rows "
            f"of {columns} columns"
        )
    if not (some.before >= 0 and some.behind >= 0 and some.before + some.behind < some.count):
        raise InvalidInput(
            f"attention: {some.before} and {some.behind} of {some.count} queries are padding; leave at least one"
        )

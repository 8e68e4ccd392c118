"""The attention module of a model, the requests of a forward, and the interface of the backends that compute it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from ..arguments import instance, number, whole
from ..errors import InvalidInput
from ..tiers import KVPool, MHATokenToKVPool, MLATokenToKVPool
from ..tiers.upload import upload

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Queries:
    """Consecutive tokens of one request to compute: `count` from position `start` on of row `row` of the page table.

    The first `before` and the last `behind` of them are padding, for a model with fixed shapes: their K and V are
    written to the padding page, and their results are undefined. For cross-attention, the first `encoder_tokens`
    columns of row `encoder_row`, another row, are the slots of the encoder's tokens.

    REQUIRES: the KV of all positions before the first computed one is in the pool, or arrives with the load in flight;
    so does that of the encoder, which the model writes with `set_kv_buffer`.
    """

    row: int
    start: int
    count: int
    before: int = 0
    behind: int = 0
    encoder_row: int = 0
    encoder_tokens: int = 0


class PagedKeys(NamedTuple):
    """The keys of each request as FlashInfer's paged kernels take them, int32: `pages` on the pool's device, the others
    on the host. Request i has tokens `query_indptr[i]` .. `query_indptr[i + 1] - 1` of the batch, and `lengths[i]` keys
    in `pages[page_indptr[i] : page_indptr[i + 1]]`, with `last_page_tokens[i]` of them in the last page.
    """

    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    pages: torch.Tensor
    last_page_tokens: torch.Tensor
    lengths: torch.Tensor


class RadixAttention(torch.nn.Module):
    """Attention of one layer over the paged KV of a pool: its numbers, and the call of a batch's backend. It does not
    have weights or state.

    `heads` query heads of `head_dim` share `kv_heads` KV heads. `layer` is the layer's number in the pool. `scale`
    multiplies the logits, 1 / sqrt(head_dim) by default; `logit_cap` c replaces them by c * tanh(logit / c). With a
    `sliding_window` of n, a query sees n keys, including its own. `v_head_dim` is the size of a V head, by default that
    of a K head. With an MLA pool, K is the latent (`head_dim` is its size, `kv_heads` 1) and V its first `v_head_dim`
    columns, as in the absorbed form.

    The pool has K divided by `k_scale` and V by `v_scale`; a latent has only the first. With `is_cross_attention` each
    query sees all keys of the encoder, and only those. `pos_encoding_mode` is for a backend that encodes positions
    itself, in FlashInfer's words "ROPE_LLAMA" or "ALIBI"; with "NONE" the model does.

    Raises InvalidInput for a number out of range, and for a window with cross-attention.
    """

    def __init__(  # noqa: PLR0913 - the numbers of a layer
        self, heads: int, head_dim: int, kv_heads: int, layer: int, *, scale: float | None = None,
        v_head_dim: int | None = None, logit_cap: float | None = None, sliding_window: int | None = None,
        is_cross_attention: bool = False, pos_encoding_mode: str = "NONE", k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = whole("attention: heads", heads, 1), whole("attention: head_dim", head_dim, 1)
        self.kv_heads, self.layer = whole("attention: kv_heads", kv_heads, 1), whole("attention: layer", layer)
        if self.heads % self.kv_heads:
            raise InvalidInput(f"attention: {heads} query heads cannot share {kv_heads} heads of KV; use a divisor")
        if is_cross_attention and sliding_window is not None:
            raise InvalidInput("attention: cross-attention sees all keys of the encoder; leave out sliding_window")
        self.v_head_dim = head_dim if v_head_dim is None else whole("attention: v_head_dim", v_head_dim, 1)
        self.scale = 1.0 / math.sqrt(head_dim) if scale is None else number("attention: scale", scale, positive=True)
        self.logit_cap, self.k_scale, self.v_scale = (
            None if value is None else number(f"attention: {name}", value, positive=True)
            for name, value in (("logit_cap", logit_cap), ("k_scale", k_scale), ("v_scale", v_scale))
        )
        self.sliding_window = None
        if sliding_window is not None:
            self.sliding_window = whole("attention: sliding_window", sliding_window, 1)
        self.is_cross_attention = instance("attention: is_cross_attention", is_cross_attention, bool)
        self.pos_encoding_mode = instance("attention: pos_encoding_mode", pos_encoding_mode, str)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, batch: AttentionBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Return `[tokens, heads * v_head_dim]` in the dtype of `q`.

        `q` is `[tokens, heads, head_dim]`, or the same elements in two dimensions. `k` and `v` are the same with
        `kv_heads`; `v` is None with an MLA pool. K and V are written to the pool in its dtype and read back from there.
        Without `save_kv_cache` the pool is unchanged. With `k` None the KV is already in the pool, as it always is for
        cross-attention.

        Waits for the load in flight like `get_kv_buffer` (on CUDA: on the current stream), and raises TransferError if
        the load failed. Raises InvalidInput for tensors of another shape and for a pool of another shape; then the pool
        is unchanged. Compiled code is one operation, `torch.ops.hicache.attention`, at which a graph can be split; it
        takes the batch from `forward_context` instead.
        """
        if torch.compiler.is_compiling():
            output = q.new_empty((q.shape[0], self.heads * self.v_head_dim))
            _attention(q, k, v, output, self.layer, save_kv_cache)
            return output
        shape, mla, tokens = batch.pool.geometry, isinstance(batch.pool, MLATokenToKVPool), batch.tokens
        v_fits = self.v_head_dim <= shape.head_dim if mla else self.v_head_dim == shape.value_dim
        if (shape.heads, shape.head_dim) != (self.kv_heads, self.head_dim) or not v_fits or self.layer >= shape.layers:
            raise InvalidInput(
                f"attention: layer {self.layer}, {self.kv_heads} heads of {self.head_dim} (V: {self.v_head_dim}), but "
                f"the pool has {shape.layers} layers, {shape.heads} heads of {shape.head_dim} (V: {shape.value_dim})"
            )
        if mla and self.v_scale is not None:
            raise InvalidInput("attention: v_scale with an MLA pool, where V is a part of K; pass only k_scale")
        if self.is_cross_attention and k is not None:
            raise InvalidInput("attention: write the encoder's KV with the pool's set_kv_buffer, and pass None as K, V")
        if (k is None or mla) is not (v is None):
            raise InvalidInput("attention: pass K and V, or neither; with an MLA pool the latent as K and V as None")
        sizes = {"q": (q, self.heads * self.head_dim), "k": (k, self.kv_heads * self.head_dim),
                 "v": (v, self.kv_heads * self.v_head_dim)}
        for name, (tensor, size) in sizes.items():
            if tensor is not None and (tensor.shape[0], math.prod(tensor.shape[1:])) != (tokens, size):
                raise InvalidInput(
                    f"attention: {name} is {list(tensor.shape)}; {tokens} tokens of {size} elements are needed"
                )
        k, v = (None if part is None else part.reshape(tokens, self.kv_heads, -1) for part in (k, v))
        q = q.reshape(tokens, self.heads, self.head_dim)
        result = batch.backend.forward(q, k, v, self, batch, save_kv_cache)
        return result.reshape(tokens, self.heads * self.v_head_dim)


class AttentionBackend(Protocol):
    """Computes the attention of layers: `SdpaBackend`, or paged kernels of your own."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: RadixAttention,
        batch: AttentionBatch, save_kv_cache: bool,
    ) -> torch.Tensor:
        """Return `[tokens, heads, v_head_dim]` in the dtype of `q`, or the same elements in two dimensions.

        `RadixAttention` has checked and shaped `q` `[tokens, heads, head_dim]`, `k` `[tokens, kv_heads, head_dim]` and
        `v` `[tokens, kv_heads, v_head_dim]`, which is None with an MLA pool. With `save_kv_cache`, and if `k` is not
        None, the backend writes `k` and `v` at `batch.slots` with `set_kv_buffer` and the scales of the layer. Then it
        reads with `get_kv_buffer`, which waits for the load in flight, and finds the keys by `batch.paged_keys` or in
        `batch.table`. Raises InvalidInput, before it writes, for a number of the layer that it does not support.
        """


class AttentionBatch:
    """The requests of one forward, for all of its layers. Its tokens are those of all `queries`, in order.

    `table` is `[requests, context]`, integers on the pool's device: row r, column t is the slot of token t, and the
    columns of a page are slots of one page, as in `RequestToTokenPool`. `backend` is an `SdpaBackend` by default. The
    KV of the batch is written at `slots`, int64 `[tokens]`; `positions` is the column of each token, of the same shape.
    All tensors are made on the device's current stream, from numbers on the host, without waiting for the device.

    REQUIRES: no two `queries` have the same row. Raises InvalidInput for a pool that is not an attention pool or holds
    integers, for empty queries, and for queries outside the table.
    """

    default_backend: ClassVar[AttentionBackend]  # the package sets it

    def __init__(
        self, pool: KVPool, table: torch.Tensor, queries: Sequence[Queries], backend: AttentionBackend | None = None
    ) -> None:
        if not isinstance(pool, MHATokenToKVPool | MLATokenToKVPool) or not pool.dtype.is_floating_point:
            raise InvalidInput(f"attention: a {type(pool).__name__}; pass an MHA or MLA pool of floating-point numbers")
        if not queries:
            raise InvalidInput("attention: queries is empty; a batch needs at least one")
        for some in queries:
            _require_place(some, *table.shape)
        self.pool, self.table, self.queries = pool, table, queries
        self.backend = self.default_backend if backend is None else backend
        self.tokens = sum(some.count for some in queries)
        self._made: dict[Hashable, Any] = {}
        places = np.empty((3, self.tokens), np.int64)
        token = 0
        for some in queries:
            here = places[:, token : token + some.count]
            here[0], here[1], here[2] = some.row, np.arange(some.start, some.start + some.count), 0
            here[2, some.before : some.count - some.behind] = 1
            token += some.count
        rows, self.positions, computed = upload(places, pool.device)
        self.slots = table[rows, self.positions].to(torch.int64) * computed

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned in the first call with this key: for work that serves all layers of a forward."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def paged_keys(self, *, encoder: bool = False) -> PagedKeys:
        """Return the pages of all keys up to the last query, or of the encoders. The same object for all layers.

        The keys of padding `behind` the computed queries are in unused slots of a page, or in the padding page.
        """
        return self.once(("paged_keys", encoder), lambda: self._paged_keys(encoder))

    def _paged_keys(self, encoder: bool) -> PagedKeys:
        page_size = self.pool.geometry.page_size
        rows, counts, lengths, used = np.array([
            (one.encoder_row, one.count, one.encoder_tokens, one.encoder_tokens) if encoder else
            (one.row, one.count, one.start + one.count, one.start + one.count - one.behind) for one in self.queries
        ]).T
        pages = -(-lengths // page_size)
        columns = np.concatenate([np.arange(0, length, page_size) for length in lengths])
        there = np.stack([np.repeat(rows, pages), columns, columns < np.repeat(used, pages)])
        row, column, exists = upload(there, self.pool.device)
        queries_to, pages_to, last, keys = (
            torch.from_numpy(numbers.astype(np.int32)) for numbers in
            (np.cumsum([0, *counts]), np.cumsum([0, *pages]), lengths - (pages - 1) * page_size, lengths)
        )
        found = (self.table[row, column] // page_size * exists).to(torch.int32)
        return PagedKeys(queries_to, pages_to, found, last, keys)


def _require_place(some: Queries, rows: int, columns: int) -> None:
    in_table = 0 <= some.row < rows and some.start >= 0 and 0 < some.count <= columns - some.start
    if not (in_table and 0 <= some.encoder_row < rows and 0 <= some.encoder_tokens <= columns):
        raise InvalidInput(f"attention: queries outside a table of {rows} rows and {columns} columns: {some}")
    if not (some.before >= 0 and some.behind >= 0 and some.before + some.behind < some.count):
        raise InvalidInput(
            f"attention: {some.before} and {some.behind} of {some.count} queries are padding; leave at least one"
        )


_context = threading.local()


@contextlib.contextmanager
def forward_context(batch: AttentionBatch, layers: Sequence[RadixAttention]) -> Iterator[None]:
    """Give its batch and layers to compiled code that runs in the block, on this thread. Enter it outside of that code.

    The tensors may have more rows than the batch has tokens, as in CUDA graphs of fixed sizes; the results of the other
    rows are zeros. Raises InvalidInput if two layers have the same number.
    """
    numbered = {layer.layer: layer for layer in layers}
    if len(numbered) < len(layers):
        raise InvalidInput(f"attention: {len(layers)} layers have {len(numbered)} numbers; give each its own")
    before = getattr(_context, "now", None)
    _context.now = batch, numbered
    try:
        yield
    finally:
        _context.now = before


# Without results, so torch needs no fake implementation for it.
@torch.library.custom_op("hicache::attention", mutates_args=("output",))
def _attention(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, output: torch.Tensor, layer: int,
    save_kv_cache: bool,
) -> None:
    batch, layers = getattr(_context, "now", None) or (None, ())
    if batch is None or layer not in layers:
        raise InvalidInput(f"attention: compiled code of layer {layer}; run it in a `forward_context` with this layer")
    k, v = (None if part is None else part[: batch.tokens] for part in (k, v))
    output[: batch.tokens] = layers[layer].forward(q[: batch.tokens], k, v, batch, save_kv_cache)
    output[batch.tokens :] = 0

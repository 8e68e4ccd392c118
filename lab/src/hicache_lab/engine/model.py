"""A Llama forward over the paged KV pool. Its results do not depend on the state of the cache.

A token's KV and logits have the same bits whether its prefix was computed now, loaded from another tier or found on the
device, for all ways to cut a prompt into chunks, and for all other requests of the batch. So tests can compare cached
and computed results for equality. With sliding windows, this is true for one page size. It holds by construction:

1. All work is done in tiles of `TILE` consecutive positions of one request. Position p is always row p % TILE of tile
   p // TILE. Rows that are not computed in this call are zeros.
2. Every product of activations and weights is one call of the fixed shape [TILE, in] x [in, out]. BLAS libraries
   choose kernels, and with them the order of a sum, by shape. So tiles are never stacked, although that is faster.
3. A tile is a separate `AttentionBatch`: TILE queries over exactly (t + 1) * TILE keys, read from the pool. So the
   shapes of `RadixAttention` depend only on the position. KV of the tile itself is also read from the pool, so a pool
   of a narrower dtype rounds it once, for all requests. The scales of KV in float8 are constants of the model.
4. Row i of a matrix product, a normalisation or an attention depends only on row i of its input. Keys after a position
   have the weight 0. K and V after the last computed token are zeros, so that other content of the pool (a freed page,
   a NaN) cannot pass through 0 * x.
5. Products run on one thread, because the number of threads changes the partial sums. Operands are in memory that torch
   has aligned, because vector code treats the ends of unaligned rows differently.
6. A window of a tile begins with the page of the first key of its row 0, so its shapes depend only on position and page
   size. For rows that are not computed, these keys may be without a slot. Then the padding block is read, which is
   finite and has the weight 0 for all computed rows.
7. A recurrent state is computed token by token, with fixed shapes, and is float32 on all tiers.

The cost is TILE rows of work for each decoded token. On CUDA the same holds if the device's libraries compute a fixed
shape in a fixed order, which they do on one stream without TF32.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from hicache.attention import AttentionBatch, Queries, RadixAttention
from hicache.errors import CapacityError, InvalidInput, InvariantError
from hicache.tiers import Fence, MHATokenToKVPool, RequestToTokenPool, TrailingPool, token_slots
from hicache.tiers.upload import upload

from .checkpoint import LayerKind, LlamaConfig, kv_scales
from .interface import Batch
from .requests import Request
from .sampling import greedy, pick
from .trailing import TrailingLayers

# Positions per tile. Measured on one CPU core with the bundled model: 8 rows slow a prefill down by a quarter, 32 rows
# slow a decode step down by two fifths.
TILE = 16


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to compute: `tokens` are the positions from `start` of the request in row `row` of the request table.

    REQUIRES: the KV of all positions before `start` is in the pool, or arrives with the load in flight. The row
    contains the slots of all positions up to the last one; each `page_size` of them are one page. So do those of
    `TrailingLayers`, as far as they need them (`place`). No two spans of a forward have the same row.
    """

    row: int
    start: int
    tokens: Sequence[int] = field(repr=False)


class _Tile(NamedTuple):
    row: int
    number: int
    first: int  # the computed rows of the tile are `first` .. `last - 1`
    last: int
    batches: dict[LayerKind, AttentionBatch]  # of this tile only


class _Layer(NamedTuple):
    """Weights of one layer, matrices `[out, in]`; projections that read the same input are one matrix."""

    input_norm: torch.Tensor
    qkv: torch.Tensor  # in a linear layer also the projection of the decay
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class _Logits:
    """The output of a forward: logits `[len(batch), vocab_size]`, and the requests they belong to."""

    def __init__(self, logits: torch.Tensor, batch: Batch, begin_s: float) -> None:
        self._logits = logits
        self._requests = [request for request, _ in batch]
        self._begin_s = begin_s
        self._best: list[int] = []

    def wait(self) -> float:
        # Only here does the host wait for the device in a step.
        self._best = greedy(self._logits)
        took_s = time.perf_counter() - self._begin_s
        if any(request.sampling.temperature > 0 for request in self._requests):
            self._logits = self._logits.cpu()  # all rows at once, instead of one by one in `token`
        return took_s

    def token(self, index: int) -> int:
        request = self._requests[index]
        return pick(self._logits[index], self._best[index], request.sampling, len(request.tokens))


class LlamaModel:
    """Weights in float32 on the pool's device, and the forward. Reads the request table, writes the KV pool.

    Runs on the scheduler thread. On the CPU, a call returns after its computation. `trailing` has the memory of layers
    with a window or a state; a model without such layers does not need it. Raises InvalidInput if the pools do not fit
    the model.

    Invariant, verified by `check()`: each running request has its own row of the request table, which contains the
    slots of its pages. Other rows are not in use.
    """

    def __init__(
        self,
        config: LlamaConfig,
        tensors: Mapping[str, torch.Tensor],
        pool: MHATokenToKVPool,
        requests: RequestToTokenPool,
        trailing: TrailingLayers | None = None,
    ) -> None:
        shape, layers = pool.geometry, config.layers_of(LayerKind.FULL)
        if (shape.layers, shape.heads, shape.head_dim) != (layers, config.kv_heads, config.head_dim):
            raise InvalidInput(
                f"model: {layers} layers of {config.kv_heads} KV heads of {config.head_dim}, but the pool has "
                f"{shape.layers} of {shape.heads} of {shape.head_dim}"
            )
        if layers < config.layers and trailing is None:
            raise InvalidInput("model: layers with a window or a state need trailing pools; pass TrailingLayers")
        columns = requests.table.shape[1]
        if columns % TILE:
            raise InvalidInput(f"model: the request table has {columns} columns; use a multiple of {TILE}")
        self.config = config
        self.pool = pool
        self.requests = requests
        self.device = pool.device
        self.trailing: Sequence[TrailingPool] = () if trailing is None else trailing.pools
        self._trailing = trailing
        self.vocab_size = config.vocab_size
        self.eos_tokens = config.eos_tokens
        self.context_tokens = min(config.context_tokens, columns)
        self._rows: dict[str, int] = {}  # by request id
        self._page_size = shape.page_size
        self._embedding = self._weight(tensors, "model.embed_tokens.weight")
        self._final_norm = self._weight(tensors, "model.norm.weight")
        self._head = self._embedding if config.tied_embeddings else self._weight(tensors, "lm_head.weight")
        self._layers = [
            self._load_layer(tensors, f"model.layers.{layer}", kind) for layer, kind in enumerate(config.kinds)
        ]
        # The number of each layer in its pool.
        self._numbers = [config.kinds[:layer].count(kind) for layer, kind in enumerate(config.kinds)]
        # Without a scale instead of with 1, attention reads KV of float32 as it is.
        scales = [[scale if scale != 1 else None for scale in some] for some in kv_scales(config, tensors, shape.dtype)]
        windows = {LayerKind.WINDOW: config.sliding_window}
        self._attention = [
            RadixAttention(
                config.heads, config.head_dim, config.kv_heads, number, sliding_window=windows.get(kind),
                k_scale=k_scale, v_scale=v_scale,
            )
            for number, kind, k_scale, v_scale in zip(self._numbers, config.kinds, *scales, strict=True)
        ]
        self._cos, self._sin = _rotary_tables(config, columns, self.device)

    def _weight(self, tensors: Mapping[str, torch.Tensor], *names: str) -> torch.Tensor:
        parts = [tensors[name].to(device=self.device, dtype=torch.float32) for name in names]
        # A copy: tensors of a file are mapped at any offset, and products need aligned memory.
        return torch.cat(parts).contiguous() if len(parts) > 1 else parts[0].clone()

    def _load_layer(self, tensors: Mapping[str, torch.Tensor], prefix: str, kind: LayerKind) -> _Layer:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        inputs = ["q", "k", "v", "decay"] if kind is LayerKind.LINEAR else ["q", "k", "v"]
        return _Layer(
            self._weight(tensors, f"{prefix}.input_layernorm.weight"),
            self._weight(tensors, *(f"{attention}.{name}_proj.weight" for name in inputs)),
            self._weight(tensors, f"{attention}.o_proj.weight"),
            self._weight(tensors, f"{prefix}.post_attention_layernorm.weight"),
            self._weight(tensors, f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            self._weight(tensors, f"{mlp}.down_proj.weight"),
        )

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of the work of `forward`, or None on the CPU."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    # Called by the scheduler; see `Model`

    @property
    def requests_max(self) -> int:
        return self.requests.free_rows

    def begin(self, request: Request) -> None:
        rows = self.requests.alloc(1)
        if rows is None:
            raise InvariantError("engine: fewer rows are free than requests may run")
        (self._rows[request.rid],) = rows
        self.place(request)

    def place(self, request: Request) -> None:
        self.requests.write(self._rows[request.rid], request.held_kv().pages, self._page_size)

    def compute(self, batch: Batch) -> _Logits:
        begin_s = time.perf_counter()
        if self._trailing is not None:
            for request, count in batch:
                row, start = self._rows[request.rid], request.kv_tokens
                self._trailing.place(row, request.held_kv().pages, start, start + count)
        spans = [
            Span(self._rows[request.rid], request.kv_tokens,
                 request.tokens[request.kv_tokens : request.kv_tokens + count])
            for request, count in batch
        ]
        return _Logits(self.forward(spans), batch, begin_s)

    def fence(self) -> Fence | None:
        return None if (stream := self.stream) is None else stream.record_event()

    def end(self, request: Request) -> None:
        row = self._rows.pop(request.rid, None)
        if row is not None:
            self.requests.free(row)

    def check(self, running: Sequence[Request]) -> None:
        table = self.requests.table
        rows = {request.rid: self._rows.get(request.rid) for request in running}
        if rows != self._rows or table.shape[0] - self.requests.free_rows != len(set(rows.values())):
            raise InvariantError(f"engine: {len(rows)} requests run, but other rows are in use")
        for request in running:
            slots = torch.from_numpy(token_slots(request.held_kv().pages, self._page_size))[: table.shape[1]]
            if not torch.equal(table[self._rows[request.rid], : len(slots)].cpu().long(), slots):
                raise InvariantError(f"engine: the row of {request.rid} does not name its pages")

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Compute the KV of all `spans` into the pool. Return the logits of each span's last token, float32
        `[len(spans), vocab_size]`.

        A prefill is a span of many tokens, a decode step a span of one; one call may contain both. Reading the KV of a
        layer waits for the pool's load in flight. Raises InvalidInput for an empty span or a token outside the
        vocabulary and CapacityError for a position beyond the table, both before any computation; TransferError if the
        load failed (then the KV of these spans in the pool is not usable).
        """
        for span in spans:
            self._check_span(span)
        with _single_thread():
            tiles: list[_Tile] = []
            states: list[torch.Tensor] = []
            last_tiles = []
            for span in spans:
                self._cut(span, tiles, states)
                last_tiles.append(len(tiles) - 1)
            if self._trailing is not None:
                self._trailing.begin()
            for layer in range(self.config.layers):
                for position, tile in enumerate(tiles):
                    states[position] = self._layer(layer, tile, states[position])
            if self._trailing is not None:
                self._trailing.end()
            logits = torch.empty((len(spans), self.config.vocab_size), device=self.device)
            for row, position in enumerate(last_tiles):
                normed = self._norm(states[position], self._final_norm)
                logits[row] = torch.mm(normed, self._head.t())[tiles[position].last - 1]
        return logits

    def _check_span(self, span: Span) -> None:
        if not len(span.tokens) or span.start < 0:
            raise InvalidInput(f"model: a span of {len(span.tokens)} tokens from position {span.start}")
        if not (min(span.tokens) >= 0 and max(span.tokens) < self.config.vocab_size):
            raise InvalidInput(f"model: a token id is outside 0 .. {self.config.vocab_size - 1}")
        end = span.start + len(span.tokens)
        if end > self.requests.table.shape[1]:
            raise CapacityError(f"model: position {end - 1} is beyond a context of {self.requests.table.shape[1]}")

    def _cut(self, span: Span, tiles: list[_Tile], states: list[torch.Tensor]) -> None:
        """Append the tiles of `span` and their embedded tokens, `[TILE, hidden]` each."""
        embedded = self._embedding[upload(np.array(span.tokens, np.int64), self.device)]
        position, done, count = span.start, 0, len(span.tokens)
        while done < count:
            index, first = divmod(position + done, TILE)
            last = min(TILE, first + count - done)
            state = torch.zeros((TILE, self.config.hidden_size), device=self.device)
            state[first:last] = embedded[done : done + last - first]
            queries = Queries(span.row, index * TILE, TILE, before=first, behind=TILE - last)
            batches = {LayerKind.FULL: AttentionBatch(self.pool, self.requests.table, [queries])}
            if self._trailing is not None and self._trailing.windows is not None:
                windows = AttentionBatch(self._trailing.windows, self._trailing.table, [queries])
                batches[LayerKind.WINDOW] = windows
            tiles.append(_Tile(span.row, index, first, last, batches))
            states.append(state)
            done += last - first

    def _layer(self, layer: int, tile: _Tile, state: torch.Tensor) -> torch.Tensor:
        """Compute one layer of one tile, `[TILE, hidden]` in and out, and write the KV of the computed rows."""
        weights = self._layers[layer]
        normed = self._norm(state, weights.input_norm)
        attended = self._attend(layer, tile, torch.mm(normed, weights.qkv.t()))
        state = state + torch.mm(attended, weights.output.t())
        gate, up = torch.mm(self._norm(state, weights.mlp_norm), weights.gate_up.t()).chunk(2, dim=1)
        return state + torch.mm(F.silu(gate) * up, weights.down.t())

    def _attend(self, layer: int, tile: _Tile, qkv: torch.Tensor) -> torch.Tensor:
        """Mix the tokens of a tile with those before: `[TILE, (heads + 2 * kv_heads) * head_dim]`, in a linear layer
        with `kv_heads` more columns, to `[TILE, heads * head_dim]`.
        """
        heads, kv_heads, dim = self.config.heads, self.config.kv_heads, self.config.head_dim
        kind, columns = self.config.kinds[layer], (heads + 2 * kv_heads) * dim
        parts = qkv[:, :columns].view(TILE, heads + 2 * kv_heads, dim)
        values = parts[:, heads + kv_heads :]
        if kind is LayerKind.LINEAR and self._trailing is not None:
            positions = range(tile.number * TILE + tile.first, tile.number * TILE + tile.last)
            queries = parts[:, :heads].reshape(TILE, kv_heads, heads // kv_heads, dim)
            keys, gate = parts[:, heads : heads + kv_heads], qkv[:, columns:]
            mixed = self._trailing.recur((self._numbers[layer], tile.row), positions, queries, keys, values, gate)
            return mixed.view(TILE, heads * dim)
        place = slice(tile.number * TILE, (tile.number + 1) * TILE)
        turned = _rotate(parts[:, : heads + kv_heads], self._cos[place], self._sin[place])
        attended: torch.Tensor = self._attention[layer](
            turned[:, :heads], turned[:, heads:], values, tile.batches[kind]
        )
        return attended

    def _norm(self, state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply RMSNorm (Zhang and Sennrich, 2019) over the last dimension."""
        mean_square = state.pow(2).mean(dim=-1, keepdim=True)
        return state * torch.rsqrt(mean_square + self.config.rms_norm_eps) * weight


def _rotary_tables(config: LlamaConfig, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines `[positions, 1, head_dim]` of rotary embedding (Su et al., 2021), halves side by side.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=1)[:, None, :]
    # In float64 first: an angle of some thousand radians is not precise enough in float32.
    return angles.cos().to(device, torch.float32), angles.sin().to(device, torch.float32)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `[TILE, heads, head_dim]` by the angles of its positions; dimension i is paired with i + head_dim / 2."""
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-right, left), dim=-1) * sin


@contextlib.contextmanager
def _single_thread() -> Iterator[None]:
    """Compute on the calling thread only, then restore the program's number of threads."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

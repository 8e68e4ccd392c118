"""The layers of a model that need only the last tokens of a prefix: sliding windows and recurrent states.

Their memory is in trailing pools of the cache. In each forward, `place` looks up the slots of the pages that the
forward reads and writes. `TreeCache.prepare` has made room for them.

A layer with a window is `RadixAttention` over the blocks of its slots, through a page table of its own.

A linear layer has a state S of `[head_dim, head_dim]` per KV head, and a decay a per token and KV head. It is linear
attention (Katharopoulos et al., 2020) with the gate of Yang et al. (2024), a number instead of a vector:

    S_t = a_t * S_(t-1) + k_t v_t^T      o_t = q_t S_t / sqrt(head_dim)      a_t = sigmoid(W x_t) ** (1 / 16)

The state after the last token of a page is written to the page's slot. A forward that begins with a page reads the slot
of the page before it; one that begins inside a page continues with the live state of its row. The live states change
only when all layers have been computed, so a forward that failed can be repeated.
"""

from __future__ import annotations

import numpy as np
import torch

from hicache.errors import InvariantError
from hicache.tiers import BlockPool, EngineBlocks, MHATokenToKVPool, TrailingPool, token_slots
from hicache.tiers.upload import upload
from hicache.types import PageIds

from .checkpoint import LayerKind, LlamaConfig

# The exponent of a decay, as in the paper: a gate of one half then forgets a half in 16 tokens instead of one.
_DECAY_EXPONENT = 1 / 16


class TrailingLayers:
    """The pools of a model's windows and states with `slots` slots each, and their tables of `rows` rows.

    `pools` are for `create_cache`. `windows` is the KV pool of the layers with a window, None without such layers;
    `table` is its page table, int32 `[rows, columns]`. `dtype` is that of windows; states are float32. Raises
    CapacityError if the device has too little memory.
    """

    def __init__(
        self, config: LlamaConfig, page_size: int, slots: int, rows: int, columns: int, *,
        dtype: str = "float32", device: torch.device | str = "cpu",
    ) -> None:
        self._page_size = page_size
        self.pools: list[TrailingPool] = []
        self.windows: MHATokenToKVPool | None = None
        if config.sliding_window is not None:
            self.windows = MHATokenToKVPool(config.geometry(page_size, dtype, LayerKind.WINDOW), slots, device)
            self.pools.append(TrailingPool("window", self.windows, max(1, config.sliding_window - 1)))
        self.table = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        state = (config.kv_heads, config.head_dim, config.head_dim)
        layers = range(config.layers_of(LayerKind.LINEAR))
        self._states = [torch.zeros((slots + 1, *state), device=device) for _ in layers]
        self._live = [torch.zeros((rows, *state), device=device) for _ in layers]
        self._next: dict[tuple[int, int], torch.Tensor] = {}  # by layer and row: states of the forward in progress
        self._state_slots = np.zeros((rows, -(-columns // page_size)), np.int32)
        if self._states:
            self._state_pool = BlockPool(EngineBlocks([[layer] for layer in self._states], first=1))
            self.pools.append(TrailingPool("state", self._state_pool, 1))

    def place(self, row: int, pages: PageIds, start: int, end: int) -> None:
        """Look up the slots for a forward of the tokens `start` to `end - 1` in `row`, a request with `pages`.

        Earlier pages get the padding block: it is only read for rows of a tile that are not computed. Raises
        InvariantError if a page has no slot.
        """
        last = -(-end // self._page_size)
        for pool in self.pools:
            first = max(0, start - pool.trailing_tokens) // self._page_size
            slots = pool.slots(pages[first:last])
            if not slots.all():
                raise InvariantError(f"engine: a forward of tokens {start} to {end - 1} without slots of {pool.name}")
            if pool.pool is not self.windows:
                self._state_slots[row, first:last] = slots
                continue
            begin = first * self._page_size
            tokens = token_slots(slots, self._page_size)[: self.table.shape[1] - begin].astype(np.int32)
            self.table[row, :begin] = 0
            self.table[row, begin : begin + len(tokens)] = upload(tokens, self.table.device)

    def begin(self) -> None:
        """Begin a forward: forget the states of one that failed."""
        self._next.clear()

    def recur(
        self, place: tuple[int, int], positions: range, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        gate: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a linear layer, token by token, for `positions` of a request. Return a tensor like `q`.

        `place` is the layer's number among the linear layers, and the request's row. The tensors are of a whole tile:
        position p is row p % tile of `q` `[tile, kv_heads, heads / kv_heads, head_dim]`, `k` and `v` `[tile, kv_heads,
        head_dim]` and `gate` `[tile, kv_heads]`. Rows of other positions are zeros in the result.
        """
        output, tile = q.new_zeros(q.shape), len(q)
        q = q * q.shape[-1] ** -0.5
        decay = torch.sigmoid(gate).pow(_DECAY_EXPONENT)[:, :, None, None]
        (layer, row), state = place, self._state(place, positions.start)
        for position in positions:
            index = position % tile
            state = state * decay[index] + k[index, :, :, None] * v[index, :, None, :]
            output[index] = torch.bmm(q[index], state)
            page, rest = divmod(position + 1, self._page_size)
            if rest == 0:
                self._states[layer][self._state_slots[row, page - 1]] = state
        self._next[place] = state
        return output

    def end(self) -> None:
        """End a forward that has computed all layers."""
        for (layer, row), state in self._next.items():
            self._live[layer][row] = state

    def _state(self, place: tuple[int, int], position: int) -> torch.Tensor:
        """Return the state before `position`."""
        if place in self._next:
            return self._next[place]
        layer, row = place
        if position % self._page_size:
            return self._live[layer][row]
        if position == 0:
            return torch.zeros_like(self._live[layer][row])
        self._state_pool.wait_layer(layer)
        return self._states[layer][self._state_slots[row, position // self._page_size - 1]]

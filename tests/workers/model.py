"""A toy model with tensor-parallel ranks. Its next token depends on each KV element of the prefix on each rank.

All arithmetic is on 64-bit integers that wrap, so a sum is the same in any order. The tokens are therefore equal for
any number of ranks, any batch, and any loaded part of the prefix.

A rank owns some heads and keeps their KV in blocks as vLLM does: per layer one tensor `[2, blocks, block, heads, dim]`
(K and V) of int32. In each layer, a head sums its whole prefix. Each element has its own odd weight, so a change of one
element changes the sum, and the KV of the next layer depends on the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

VOCABULARY = 50_021
_WORD = 1 << 64
# Odd 64-bit numbers without a pattern, as signed integers. Multiplication by an odd number loses no bit.
_TOKEN, _POSITION, _HEAD, _DIM, _SUM = (
    number - _WORD if number >= _WORD // 2 else number
    for number in (
        0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F,
    )
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of the model over all ranks. A block has `block` tokens; a page has `blocks_per_page` blocks."""

    layers: int = 3
    heads: int = 4
    dim: int = 4
    block: int = 4
    blocks_per_page: int = 2

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.block * self.blocks_per_page

    def block_bytes(self, ranks: int) -> int:
        """Return the bytes of K and V of one block in one layer on one of `ranks` ranks."""
        return 2 * self.block * (self.heads // ranks) * self.dim * 4


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each word. Different words have different results."""
    for shift, factor in ((31, _SUM), (29, _DIM)):
        logical = (words >> shift) & ((1 << (64 - shift)) - 1)
        words = (words ^ logical) * factor
    return words


class RankModel:
    """The heads of one rank, and their KV in `blocks` blocks."""

    def __init__(self, shape: ModelShape, rank: int, ranks: int, blocks: int) -> None:
        heads = shape.heads // ranks
        self._shape = shape
        self._heads = torch.arange(rank * heads, (rank + 1) * heads) * _HEAD
        # One odd weight per (K or V, dim).
        self._weights = 2 * _mix(torch.arange(2 * shape.dim) * _DIM).view(2, 1, 1, shape.dim) + 1
        self.kv = [
            torch.zeros((2, blocks, shape.block, heads, shape.dim), dtype=torch.int32)
            for _ in range(shape.layers)
        ]

    def forward(self, tokens: Sequence[int], start: int, table: Sequence[int]) -> int:
        """Write the KV of `tokens`, at positions from `start` on, and return this rank's part of the logit.

        `table` has the blocks of the positions from 0 on. REQUIRES: these blocks have the KV of the positions before
        `start`.
        """
        block = self._shape.block
        positions = torch.arange(start + len(tokens))
        blocks, offsets = torch.tensor(table)[positions // block], positions % block
        new_tokens, new = torch.tensor(tokens), slice(start, None)
        hidden = _mix((new_tokens * _TOKEN + positions[new] * _POSITION)[:, None] + self._heads)
        position_weights = 2 * _mix(positions * _POSITION)[:, None] + 1
        dims = torch.arange(2 * self._shape.dim).view(2, 1, 1, -1) * _DIM
        for kv in self.kv:
            kv[:, blocks[new], offsets[new]] = (_mix(hidden[:, :, None] + dims) >> 32).to(torch.int32)
            read = kv[:, blocks, offsets].to(torch.int64) * self._weights
            sums = (read.sum((0, 3)) * position_weights).cumsum(0)
            hidden = _mix(hidden ^ (sums[new] * _SUM))
        return int(hidden[-1].sum())


def next_token(parts: Sequence[int]) -> int:
    """Return the token from the parts of all ranks."""
    return (sum(parts) * _TOKEN % _WORD >> 32) % VOCABULARY


def reference_tokens(shape: ModelShape, prompt: Sequence[int], count: int) -> list[int]:
    """Return the `count` tokens after `prompt`, computed by one model with all heads and without a cache."""
    table = range(-(-(len(prompt) + count) // shape.block))
    model = RankModel(shape, 0, 1, len(table))
    tokens, computed = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        part = model.forward(tokens[computed:], computed, table)
        computed = len(tokens)
        tokens.append(next_token([part]))
    return tokens[len(prompt) :]

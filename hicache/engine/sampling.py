"""The next token: the most likely one, or one drawn with random numbers that depend on seed and position alone.

Because logits of a token are the same bits whatever was cached or batched (see `model`), and the random numbers are a
function of (seed, position), sampled text is as reproducible as greedy text.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request picks its tokens. Temperature 0 is greedy; `top_k` 0 considers the whole vocabulary.

    Raises InvalidInput for a negative or infinite value.
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf or self.top_k < 0 or not 0 <= self.seed < 1 << 63:
            raise InvalidInput(f"sampling: temperature, top_k and seed must not be negative, got {self}")


GREEDY = Sampling()


def greedy(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row of `[rows, vocab_size]`; of equals the one with the smallest id."""
    # argmax promises no order among equals, a mask and a minimum do.
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = logits == logits.max(dim=1, keepdim=True).values
    tokens: list[int] = torch.where(best, ids, logits.shape[1]).min(dim=1).values.tolist()
    return tokens


def pick(logits: torch.Tensor, choices: Sequence[tuple[Sampling, int]]) -> list[int]:
    """The next token of each row of `[rows, vocab_size]`; `choices` has each row's sampling and token position."""
    tokens = greedy(logits)
    for row, (sampling, position) in enumerate(choices):
        if sampling.temperature > 0.0:
            tokens[row] = _draw(logits[row].cpu(), sampling, position)
    return tokens


def _draw(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled = torch.where(scaled >= scaled.topk(sampling.top_k).values[-1], scaled, -math.inf)
    name = hashlib.sha256(f"{sampling.seed}/{position}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(name[:8], "little", signed=True))
    # The exponential race: the token with the largest p / e is drawn with probability p.
    race = torch.softmax(scaled, dim=0) / torch.empty(len(scaled)).exponential_(generator=generator)
    return greedy(race[None])[0]

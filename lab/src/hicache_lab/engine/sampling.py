"""Sampling of the next token: the most likely one, or one drawn with random numbers.

The logits of a token have the same bits for all states of the cache and every batch (see `model`). The random numbers
are a function of seed and position. So sampled text is as reproducible as greedy text.
"""

from __future__ import annotations

import hashlib
import math
import sys
from dataclasses import dataclass

import torch

from hicache.arguments import number, whole
from hicache.errors import HiCacheError


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of a request. Temperature 0 is greedy; `top_k` 0 considers the whole vocabulary.

    Raises InvalidInput for a value that is negative, infinite or of another type.
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature = number("sampling: temperature", self.temperature, most=sys.float_info.max)
        object.__setattr__(self, "temperature", temperature)
        for name in ("top_k", "seed"):
            object.__setattr__(self, name, whole(f"sampling: {name}", getattr(self, name)))


GREEDY = Sampling()


def greedy(logits: torch.Tensor) -> list[int]:
    """Return the most likely token of each row of `[rows, vocab_size]`; among equal logits the one with the smallest
    id.

    For a row with a NaN this is `vocab_size`, which is not a token.
    """
    # argmax does not define the order among equal values; a mask and a minimum do.
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = logits == logits.max(dim=1, keepdim=True).values
    tokens: list[int] = torch.where(best, ids, logits.shape[1]).min(dim=1).values.tolist()
    return tokens


def pick(logits: torch.Tensor, best: int, sampling: Sampling, position: int) -> int:
    """Return the next token of a request. `logits` are `[vocab_size]`, and `best` is the result of `greedy` for them.

    REQUIRES: the logits are on the host, unless `sampling` is greedy.

    Raises HiCacheError if a logit is not a finite number.
    """
    token = _draw(logits, sampling, position) if sampling.temperature > 0 else best
    if token == len(logits):
        raise HiCacheError(f"sampling: a logit at position {position} is not a finite number; check the weights")
    return token


def _draw(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    # Differences to the largest logit, in float64: they do not overflow for any temperature, and do not become 0 / 0.
    wide = logits.double()
    scaled = (wide - wide.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled = torch.where(scaled >= scaled.topk(sampling.top_k).values[-1], scaled, -math.inf)
    name = hashlib.sha256(f"{sampling.seed}/{position}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(name[:8], "little", signed=True))
    # The exponential race: the token with the largest p / e is drawn with probability p.
    race = torch.softmax(scaled, dim=0) / torch.empty(len(scaled)).exponential_(generator=generator)
    return greedy(race[None])[0]

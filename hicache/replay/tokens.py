"""From the hash ids of a trace to token ids: equal blocks become equal tokens.

A trace names the blocks of a prompt, not its tokens, and does not name outputs at all. The tokens of a block are
therefore drawn from its id, and those of an output from the place of its request. That alone would lose what the next
turn of a conversation reuses beyond whole blocks: in a trace of real requests its prompt begins with the last prompt
*and its output*, so the block behind the last whole one is a new id there, although its first tokens are known.

The rule that finds them again: if the first new block of a prompt stands directly behind the last whole block of an
earlier prompt, which that one had brought into the trace, and the new prompt is long enough to hold the earlier one and
its output, then it continues it: it has the tokens of the earlier partial block and output there. In the public
conversation trace this holds for 3,541 of 12,031 requests, and 92 % of the candidates are long enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .trace import BLOCK_TOKENS, TraceRequest

Tokens: TypeAlias = npt.NDArray[np.uint32]
Words: TypeAlias = npt.NDArray[np.uint64]

# Token ids are below it.
VOCAB_SIZE = 1 << 31
# Domains of the generator below, so that no output ever repeats the tokens of a block.
_BLOCK, _OUTPUT = 1, 2
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one request, uint32. The first `seen_tokens` of the prompt have occurred before in the trace: what
    a cache without limits could have had."""

    prompt: Tokens
    output: Tokens
    seen_tokens: int

    @property
    def kv_tokens(self) -> bytes:
        """The tokens that have KV when the request ends, as `page_keys` takes them: all but the last of the output."""
        return np.concatenate((self.prompt, self.output[:-1])).astype("<u4", copy=False).tobytes()


class TokenSource:
    """Turns the requests of one trace into tokens. REQUIRES: it sees all of them, in the order of the trace.

    Grows by an entry for each distinct block, and by the tokens of outputs that may be or were continued. For one
    thread.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        # By the last whole block of an earlier prompt: its partial block and its output.
        self._tails: dict[int, Tokens] = {}
        # By block: the tokens it begins with, because it continues an earlier output.
        self._inherited: dict[int, Tokens] = {}

    def take(self, request: TraceRequest) -> Prompt:
        """The tokens of the next request. Takes note of it for those that continue it."""
        ids = request.hash_ids
        new = next((i for i, block in enumerate(ids) if block not in self._known), len(ids))
        inherited = self._continue(request, new)
        seen_tokens = min(request.input_length, new * BLOCK_TOKENS + inherited)
        prompt = self._blocks(ids).reshape(-1)[: request.input_length]
        output = drawn(_OUTPUT, np.array([request.index], np.uint64), request.output_length)[0]
        whole = request.whole_blocks
        if whole > new:
            self._tails[ids[whole - 1]] = np.concatenate((prompt[whole * BLOCK_TOKENS :], output))
        self._known.update(ids)
        return Prompt(prompt, output, seen_tokens)

    def _continue(self, request: TraceRequest, new: int) -> int:
        """Let the blocks from `new` on begin with an earlier output if they continue it; how many tokens that gives."""
        ids = request.hash_ids
        tail = self._tails.get(ids[new - 1]) if 0 < new < len(ids) else None
        if tail is None or request.input_length < new * BLOCK_TOKENS + len(tail):
            return 0
        for start in range(0, len(tail), BLOCK_TOKENS):
            self._inherited[ids[new + start // BLOCK_TOKENS]] = tail[start : start + BLOCK_TOKENS]
        return len(tail)

    def _blocks(self, ids: tuple[int, ...]) -> Tokens:
        blocks = drawn(_BLOCK, np.array(ids, np.uint64), BLOCK_TOKENS)
        for row, block in zip(blocks, ids, strict=True):
            head = self._inherited.get(block)
            if head is not None:
                row[: len(head)] = head
        return blocks


def drawn(domain: int, numbers: Words, length: int) -> Tokens:
    """Token ids below `VOCAB_SIZE`, `[len(numbers), length]`, a function of domain and number alone."""
    starts = mixed(numbers * np.uint64(2) + mixed(np.array([domain], np.uint64)))
    words = mixed(starts[:, None] + np.arange(length, dtype=np.uint64) * _GOLDEN)
    return (words >> np.uint64(33)).astype(np.uint32)


def mixed(values: Words) -> Words:
    """A bijection of uint64 that spreads near numbers far apart: the finisher of SplitMix64 (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

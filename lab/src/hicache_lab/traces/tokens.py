"""Makes token ids from the hash ids of a trace: equal blocks become equal tokens.

A trace names the blocks of a prompt, but not its tokens, and it does not name outputs. So the tokens of a block are
generated from its id, and those of an output from the index of its request. This alone would lose the part of a
conversation's next turn that is reused beyond whole blocks. In a trace of real requests the next prompt begins with the
previous prompt *and its output*, so the block after the last whole one has a new id, although its first tokens are
known.

The following rule finds these tokens. If the first new block of a prompt follows directly after the last whole block of
a previous prompt, which introduced that block, and the new prompt is long enough for the previous prompt and its
output, then the new prompt continues the previous one: it has the tokens of its partial block and output there. In the
public conversation trace this holds for 3,541 of 12,031 requests, and 92 % of the candidates are long enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .request import TraceRequest

Tokens: TypeAlias = npt.NDArray[np.uint32]
Words: TypeAlias = npt.NDArray[np.uint64]

# Token ids are below this number.
VOCAB_SIZE = 1 << 31
# Domains of the generator below, so that an output never repeats the tokens of a block.
_BLOCK, _OUTPUT = 1, 2
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one request, uint32. The first `seen_tokens` of the prompt have occurred before in the trace, so an
    unlimited cache could have had them."""

    prompt: Tokens
    output: Tokens
    seen_tokens: int

    @property
    def kv_tokens(self) -> bytes:
        """Return the tokens with KV at the end of the request, for `page_keys`: all except the last output token."""
        return np.concatenate((self.prompt, self.output[:-1])).astype("<u4", copy=False).tobytes()


class TokenSource:
    """Turns the requests of one trace into tokens. REQUIRES: it sees all of them, in the order of the trace.

    Its memory grows by an entry for each distinct block, and by the tokens of outputs that a later prompt may continue.
    For one thread.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        # The partial block and the output of a previous prompt, by its last whole block.
        self._tails: dict[int, Tokens] = {}
        # The first tokens of a block that continues a previous output, by block.
        self._inherited: dict[int, Tokens] = {}

    def take(self, request: TraceRequest) -> Prompt:
        """Return the tokens of the next request, and record them for requests that continue it."""
        ids, size = request.hash_ids, request.block_tokens
        new = next((i for i, block in enumerate(ids) if block not in self._known), len(ids))
        inherited = self._continue(request, new)
        seen_tokens = min(request.input_length, new * size + inherited)
        prompt = self._blocks(ids, size).reshape(-1)[: request.input_length]
        output = drawn(_OUTPUT, np.array([request.index], np.uint64), request.output_length)[0]
        whole = request.whole_blocks
        if whole > new:
            self._tails[ids[whole - 1]] = np.concatenate((prompt[whole * size :], output))
        self._known.update(ids)
        return Prompt(prompt, output, seen_tokens)

    def _continue(self, request: TraceRequest, new: int) -> int:
        """If the blocks from `new` on continue a previous output, let them begin with it. Return the number of these
        tokens."""
        ids, size = request.hash_ids, request.block_tokens
        tail = self._tails.get(ids[new - 1]) if 0 < new < len(ids) else None
        if tail is None or request.input_length < new * size + len(tail):
            return 0
        for start in range(0, len(tail), size):
            self._inherited[ids[new + start // size]] = tail[start : start + size]
        return len(tail)

    def _blocks(self, ids: tuple[int, ...], size: int) -> Tokens:
        blocks = drawn(_BLOCK, np.array(ids, np.uint64), size)
        for row, block in zip(blocks, ids, strict=True):
            head = self._inherited.get(block)
            if head is not None:
                row[: len(head)] = head
        return blocks


def drawn(domain: int, numbers: Words, length: int) -> Tokens:
    """Return token ids below `VOCAB_SIZE`, `[len(numbers), length]`, that depend only on domain and number."""
    starts = mixed(numbers * np.uint64(2) + mixed(np.array([domain], np.uint64)))
    words = mixed(starts[:, None] + np.arange(length, dtype=np.uint64) * _GOLDEN)
    return (words >> np.uint64(33)).astype(np.uint32)


def mixed(values: Words) -> Words:
    """Apply a bijection of uint64 that spreads close numbers: the finisher of SplitMix64 (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

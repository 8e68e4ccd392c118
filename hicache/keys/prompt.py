"""The tree's key of a prompt, made of its tokens or of the engine's own page hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidInput
from .chain import PAGE_KEY_BYTES, key_page_bytes, page_keys, split_keys
from .namespace import namespace_seed
from .token_ids import TOKEN_BYTES, TokenInput, token_bytes

BIGRAM_BYTES = 2 * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class RadixKey:
    """The tree's key of a prompt: `tokens` under `seed` (empty, or 32 bytes). Its repr shows lengths but not tokens.

    `position_bytes` is the kind of the key:
    - 4: a position is one token, uint32 little endian.
    - 8: a position is a token and its successor. This is for EAGLE, whose draft KV at a position also depends on the
      next token. n tokens make n - 1 positions; pages, tree and storage keys consist of pairs.
    - 32: a position is a whole page, and its bytes are the page key, which the engine passes (`of_hashes`). The tokens
      are unknown and the seed is empty.

    Raises InvalidInput for bytes that are not whole positions, for a seed of another length and for another kind.

        >>> key = RadixKey.of([1, 2, 3, 4, 5], cache_salt="tenant 7")
        >>> key, len(key.head(4))
        (RadixKey(5 tokens, with a seed), 4)
    """

    tokens: bytes
    seed: bytes = b""
    position_bytes: int = TOKEN_BYTES

    def __post_init__(self) -> None:
        if type(self.tokens) is not bytes or type(self.seed) is not bytes or type(self.position_bytes) is not int:
            raise InvalidInput("radix key: tokens and seed are bytes and position_bytes an int; use `RadixKey.of`")
        if len(self.seed) not in (0, PAGE_KEY_BYTES) or self.position_bytes not in _KINDS:
            raise InvalidInput(
                f"radix key: the seed has {len(self.seed)} bytes and a position {self.position_bytes}; use 0 or "
                "32 bytes for the seed, and 4, 8 or 32 for a position"
            )
        if self.seed and self.is_given:
            raise InvalidInput("radix key: page keys have no seed; pass extra_key and cache_salt to `of_hashes`")
        if len(self.tokens) % self.position_bytes:
            raise InvalidInput(f"radix key: {len(self.tokens)} bytes are not whole positions of {self.position_bytes}")

    def __repr__(self) -> str:
        seed = "" if self.is_given else ", with a seed" if self.seed else ", no seed"
        return f"RadixKey({len(self)} {_KINDS[self.position_bytes]}{seed})"

    @classmethod
    def of(
        cls, tokens: TokenInput, *, extra_key: str | None = None, cache_salt: str | None = None, bigram: bool = False
    ) -> RadixKey:
        """Return the key of a prompt. Raises InvalidInput as `token_bytes` and `namespace_seed` do."""
        path = token_bytes(tokens)
        seed = b"" if extra_key is None and cache_salt is None else namespace_seed(extra_key, cache_salt)
        return cls(_pairs(path), seed, BIGRAM_BYTES) if bigram else cls(path, seed)

    @classmethod
    def of_hashes(
        cls, hashes: Sequence[bytes], *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> RadixKey:
        """Return the key of a prompt from the engine's hashes of its whole pages: 32 bytes each, in order. The sequence
        may be empty.

        Each hash must cover all tokens from the start of the prompt to the end of its page, the adapter and the tenant.
        Then the hash itself is the page key. If the engine's hashes do not cover adapter and tenant, pass them here:
        page keys become SHA-256(seed || hash), so equal hashes under two seeds do not share pages on any tier.
        `Namespace.key_hash` names the algorithm of the hashes. Raises InvalidInput unless the hashes are distinct and
        have 32 bytes each, and as `namespace_seed` does.
        """
        if isinstance(hashes, (str, bytes, bytearray, memoryview)) or not isinstance(hashes, Sequence):
            raise InvalidInput(f"hashes: expected a sequence of bytes, got {type(hashes).__name__}; pass a list")
        for number, page in enumerate(hashes):
            if type(page) is not bytes or len(page) != PAGE_KEY_BYTES:
                found = f"{len(page)} bytes" if type(page) is bytes else f"a value of type {type(page).__name__}"
                raise InvalidInput(f"hashes: page {number} has {found}; pass {PAGE_KEY_BYTES} bytes for each page")
        if len(set(hashes)) != len(hashes):
            raise InvalidInput("hashes: two pages have the same hash; a hash covers all tokens before the page too")
        seed = namespace_seed(extra_key, cache_salt)
        keys = [hashlib.sha256(seed + page).digest() for page in hashes] if seed else hashes
        return cls(b"".join(keys), b"", PAGE_KEY_BYTES)

    def __len__(self) -> int:
        """Return the number of positions: the part of the prompt that can be cached."""
        return len(self.tokens) // self.position_bytes

    @property
    def is_given(self) -> bool:
        """True if the engine passed page keys. Then `tokens` contains them, and the prompt's tokens are unknown."""
        return self.position_bytes == PAGE_KEY_BYTES

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt: the positions, plus one for bigrams, whose last token starts no pair.

        Raises InvalidInput for a key of page keys.
        """
        if self.is_given:
            raise InvalidInput(
                "key: it has the page keys of a prompt, but not its tokens; use a cache of page keys, or `RadixKey.of`"
            )
        return len(self) + (self.position_bytes == BIGRAM_BYTES)

    def pages(self, page_size: int) -> int:
        """Return the number of whole pages of `page_size` tokens."""
        return len(self.tokens) // key_page_bytes(page_size, self.position_bytes)

    def page_keys(self, page_size: int, prior: bytes, start_page: int, end_page: int) -> list[bytes]:
        """Return the keys of the whole pages from `start_page` up to `end_page`: those of the engine, or hashed
        from `prior`, which is as in `page_keys`.
        """
        size = key_page_bytes(page_size, self.position_bytes)
        run = self.tokens[start_page * size : end_page * size]
        return split_keys(run) if self.is_given else page_keys(run, size // TOKEN_BYTES, prior)

    def head(self, positions: int) -> RadixKey:
        """Return the key of the first `positions` positions."""
        return RadixKey(self.tokens[: positions * self.position_bytes], self.seed, self.position_bytes)

    def continues(self, other: RadixKey) -> bool:
        """Return True if both keys have the same kind and seed, and the shorter one is a prefix of the longer one."""
        return (self.seed, self.position_bytes) == (other.seed, other.position_bytes) and (
            self.tokens.startswith(other.tokens) or other.tokens.startswith(self.tokens)
        )

    def extended(self, tokens: TokenInput) -> RadixKey:
        """Return the key of this prompt followed by more tokens, under the same seed.

        Raises InvalidInput for a bigram key of one token, which does not contain its token, and for page keys: make a
        new key instead.
        """
        if self.is_given:
            raise InvalidInput("radix key: page keys cannot be extended by tokens; make a key of all hashes")
        more = token_bytes(tokens)
        if self.position_bytes == BIGRAM_BYTES:
            if not self.tokens:
                raise InvalidInput("radix key: a bigram key of one token cannot be extended; make one of all tokens")
            more = _pairs(self.tokens[-TOKEN_BYTES:] + more)
        return RadixKey(self.tokens + more, self.seed, self.position_bytes)


# The name of a position of each kind of key.
_KINDS = {TOKEN_BYTES: "tokens", BIGRAM_BYTES: "bigrams", PAGE_KEY_BYTES: "page keys"}


def _pairs(path: bytes) -> bytes:
    """Return the overlapping pairs of uint32 tokens: a b c -> a b, b c."""
    tokens = np.frombuffer(path, dtype="<u4")
    return np.stack((tokens[:-1], tokens[1:]), axis=1).tobytes()

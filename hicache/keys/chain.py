"""Page keys: chained SHA-256 of the tokens of each page.

    page_key[i] = SHA-256( page_key[i-1] || tokens of page i as uint32 little endian )

`page_key[-1]` is empty, or a 32-byte seed made of `extra_key` (LoRA adapter) and `cache_salt` (tenant). So equal tokens
under two seeds share neither a key nor a tree node. Without a seed, the keys are the same as SGLang's. A partial last
page does not have a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from ..errors import InvalidInput
from ..lazy import native, untrack
from .token_ids import TOKEN_BYTES

PAGE_KEY_BYTES = 32

# The optional native helper: the keys of many pages in one call (hashlib: one call each), None if the processor lacks
# SHA-256 instructions.
hash_pages: Callable[[bytes, int, bytes], list[bytes] | None] | None = native("hash_pages")


def page_keys(tokens: bytes, page_size: int, prior: bytes = b"") -> list[bytes]:
    """Return the keys of the full pages in `tokens` (uint32 little endian), `page_size` tokens each, chained from
    `prior`.

    A page of n bigrams has 2 n tokens here: both tokens of each pair are hashed, as in SGLang. `prior` is the key of
    the page before the first one, or the seed, or empty. Takes about 0.5 us per 64-token page; half of that with the
    native helper, which releases the interpreter's lock. Raises InvalidInput if `prior` is neither empty nor 32 bytes.
    """
    if len(prior) not in (0, PAGE_KEY_BYTES):
        raise InvalidInput(f"page_keys: prior must be empty or {PAGE_KEY_BYTES} bytes, got {len(prior)}")
    page_bytes = page_size * TOKEN_BYTES
    if hash_pages is not None and (keys := hash_pages(tokens, page_bytes, prior)) is not None:
        return keys
    # A void array returns its elements as bytes objects in one call, which is faster than a slice per page.
    pages = np.frombuffer(tokens, dtype=f"V{page_bytes}", count=len(tokens) // page_bytes).tolist()
    sha256, key = hashlib.sha256, prior
    return [key := sha256(key + page).digest() for page in pages]


def split_keys(joined: bytes) -> list[bytes]:
    """Return the page keys in `joined`, 32 bytes each."""
    pages: list[bytes] = np.frombuffer(joined, dtype=f"V{PAGE_KEY_BYTES}").tolist()
    return pages


def common_pages(run: bytes, tokens: bytes, offset: int, page_bytes: int) -> int:
    """Return how many whole pages of `page_bytes` at the start of `run` are in `tokens` from `offset` on."""
    low, high = 0, min(len(run), len(tokens) - offset) // page_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if tokens.startswith(run[: middle * page_bytes], offset):
            low = middle
        else:
            high = middle - 1
    return low


def key_page_bytes(page_size: int, position_bytes: int) -> int:
    """Return the bytes of one page of `page_size` tokens in a `RadixKey` of this kind: its positions, or page key."""
    return PAGE_KEY_BYTES if position_bytes == PAGE_KEY_BYTES else page_size * position_bytes


class PageChain:
    """The page keys of a run of one or more whole pages. They are hashed at the first use, on the thread of that use.

    `tokens` and `page_size` are as in `page_keys`. `prior` is as in `page_keys`, or the chain of the previous run.
    `keys` are passed if they are known. `hashed` are the keys, None while they are not hashed.

    No lock: each field is one reference, `_prior` always names the key before the run, and two threads that hash at the
    same time compute the same keys.
    """

    __slots__ = ("_page_size", "_prior", "_tokens", "hashed")

    def __init__(
        self, tokens: bytes, page_size: int, prior: bytes | PageChain, keys: list[bytes] | None = None
    ) -> None:
        self._tokens = tokens
        self._page_size = page_size
        self._prior = prior
        self.hashed = keys
        untrack(self)

    def __repr__(self) -> str:
        return f"PageChain({self.pages} pages, {'not hashed' if self.hashed is None else 'hashed'})"

    @property
    def pages(self) -> int:
        """Pages of the run."""
        return len(self._tokens) // (self._page_size * TOKEN_BYTES)

    def keys(self) -> list[bytes]:
        """Return the keys. Do not modify the list."""
        missing: list[PageChain] = []
        chain = self
        while (keys := chain.hashed) is None:
            missing.append(chain)
            prior = chain._prior
            if isinstance(prior, bytes):
                keys = [prior]
                break
            chain = prior
        for chain in reversed(missing):
            chain._prior = keys[-1]
            chain.hashed = keys = page_keys(chain._tokens, chain._page_size, keys[-1])
            untrack(keys)
        return keys

    def head(self, pages: int) -> PageChain:
        """Return the chain of the first `pages` pages."""
        keys = None if self.hashed is None else self.hashed[:pages]
        return PageChain(self._tokens[: pages * self._page_size * TOKEN_BYTES], self._page_size, self._prior, keys)

    def prior_key(self) -> bytes:
        """Return the key of the page before the run, or the seed, or empty bytes."""
        prior = self._prior
        return prior if isinstance(prior, bytes) else prior.keys()[-1]
